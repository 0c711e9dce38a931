"""Generation: when and why sequences end, sampling, rules for prompts, the report."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.minimax_m2 import AS_OTHERS
from tests.spy import spy_on
from tests.tiny import ONE_RANK, make_runner, oracle_logits, save_tiny, save_tiny_m2, save_tiny_of, tiny_case
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.model_runner import make_runner as new_runner
from umbra.executor.run.prompts import encode_prompts
from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts
from umbra.models.tokenizers import tokenizer_in

PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8])]


def greedy(oracle: Any, prompt: Iterable[int], count: int) -> list[int]:
    ids = [*prompt]
    for _ in range(count):
        ids = [*ids, int(oracle_logits(oracle, ids)[-1].argmax())]
    return ids[-count:]


def test_greedy_equals_transformers_whatever_runs_beside(tmp_path: Path) -> None:
    """With fewer places than prompts, late prompts are prefilled while others decode, which changes no tokens."""
    oracle = save_tiny(tmp_path / "model", eos_token_id=None)
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", data_config={"batch_size": 2}), tmp_path)
    for sequence in runner.model_generate(PROMPTS):
        assert sequence.generated == greedy(oracle, sequence.ids[: sequence.prompt_len], 8)
        assert sequence.finish_reason == "length"
    assert not runner.loop.scheduler.caches[0].held


@pytest.mark.parametrize(("chunk", "mode"), [(1, "graph"), (7, "eager")])
def test_chunked_prefill_changes_nothing(tmp_path: Path, chunk: int, mode: str) -> None:
    oracle = save_tiny(tmp_path / "model", eos_token_id=None)
    data = {"batch_size": 3, "chunked_prefill_size": chunk}
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", data_config=data, exe_mode=mode), tmp_path)
    most: list[int] = []

    def spy(sequences: list[Sequence]) -> None:
        prompt_tokens = sum(s.new_tokens for s in sequences if s.num_computed < s.prompt_len)
        if prompt_tokens:
            most.append(prompt_tokens)

    spy_on(runner, before_pack=spy)
    for sequence in runner.model_generate(PROMPTS):
        assert sequence.generated == greedy(oracle, sequence.ids[: sequence.prompt_len], 8)
    assert max(most) == min(chunk, 3 + 1 + 23)
    assert sum(most) == sum(len(ids) for _, ids in PROMPTS)
    assert runner.loop.timings.prompt_tokens == sum(most)
    assert len(runner.loop.timings.first_token) == len(PROMPTS)


def test_each_sequence_stops_by_itself_at_any_of_several_ids(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path / "model", eos_token_id=None)
    free = [greedy(oracle, ids, 8) for _, ids in PROMPTS]
    stops = [free[0][2], free[2][5]]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", data_config={"batch_size": 3}), tmp_path)
    reasons = set()
    for sequence, tokens in zip(runner.model_generate(PROMPTS), free, strict=True):
        at = next((i + 1 for i, t in enumerate(tokens) if t in stops), None)
        assert sequence.generated == tokens[:at]
        assert sequence.finish_reason == ("length" if at is None else "stop")
        reasons.add(sequence.finish_reason)
    assert reasons == {"stop", "length"}
    ignoring = {"ignore_eos": True}
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", sampling_config=ignoring), tmp_path)
    assert [s.generated for s in runner.model_generate(PROMPTS)] == free


@pytest.mark.parametrize("mode", ["default", "chat"])
def test_prompts_equal_transformers_tokens(mode: str) -> None:
    from transformers import AutoTokenizer

    case = load_case("demo", [f"tokenizer_mode={mode}"])
    folder = ROOT / case.model_path
    hf = AutoTokenizer.from_pretrained(folder)
    for prompt, ids in zip(case.data_config.prompts, encode_prompts(case, tokenizer_in(folder)), strict=True):
        if mode == "chat":
            turns = [{"role": "user", "content": prompt}]
            assert ids == hf.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        else:
            assert ids == hf(prompt)["input_ids"]


def test_long_and_empty_prompts_follow_the_policy() -> None:
    case = load_case("demo", ["input_max_len=4"])
    tokenizer = tokenizer_in(ROOT / case.model_path)
    with pytest.raises(UserError, match=r"prompt 0 .* tokens, input_max_len is 4: raise it, or set long_prompts"):
        encode_prompts(case, tokenizer)
    whole = tokenizer.encode(case.data_config.prompts[0], chat=False)
    cut = load_case("demo", ["input_max_len=4", "long_prompts=truncate"])
    assert encode_prompts(cut, tokenizer)[0] == whole[-4:]
    with pytest.raises(UserError, match=r"prompt 1 .* has no tokens"):
        encode_prompts(load_case("demo", ['prompts=["a", ""]']), tokenizer)


def test_profiler_writes_traces_of_both_phases(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", eos_token_id=None)
    data = {"prompts": [], "batch_size": 1, "max_new_tokens": 9}
    settings = {"with_ckpt": False, "enable_profiler": True}
    case = tiny_case(tmp_path, tmp_path / "model", data_config=data, model_config=settings)
    new_runner(case, tmp_path, ONE_RANK).run()
    names = sorted(p.name for p in tmp_path.glob("trace_*.json"))
    assert names == [
        "trace_decode0_rank0.json",
        "trace_decode1_rank0.json",
        "trace_decode2_rank0.json",
        "trace_decode3_rank0.json",
        "trace_prefill0_rank0.json",
    ]
    for name in names:
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert any("linear" in str(e.get("name")) for e in events)


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2", "gpt_oss", "gemma4"])
def test_the_last_layer_computes_wanted_rows_only(tmp_path: Path, family: str) -> None:
    """Behind its attention; a prompt whose log-probabilities are asked for wants all its rows."""
    if family == "qwen3_moe":
        save_tiny(tmp_path / "model", eos_token_id=None)
    elif family == "minimax_m2":
        save_tiny_m2(tmp_path / "model", **AS_OTHERS)
    else:
        save_tiny_of(tmp_path / "model", family)
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", model_name=family), tmp_path)
    model, rows = runner.engine.model, list[int]()
    for layer in (layer for _, layer in layers_of(model) if isinstance(layer, Experts)):
        layer.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    logits = list[torch.Tensor]()
    spy_on(runner, after=lambda out: logits.append(out.clone()))
    for _, ids in PROMPTS[:3]:
        runner.loop.submit(Request(tuple(ids), SamplingParams(max_tokens=1)))
    runner.loop.step()
    whole, wanted = sum(len(ids) for _, ids in PROMPTS[:3]), 3
    assert rows == [whole] * (len(rows) - 1) + [wanted]
    rows.clear()
    for id, (_, ids) in enumerate(PROMPTS[:3]):
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0 if id == 2 else None)
        runner.loop.submit(Request(tuple(ids), asked))
    runner.loop.step()
    assert rows == [whole] * (len(rows) - 1) + [2 + len(PROMPTS[2][1])]
    assert torch.equal(logits[1][[0, 1, -1]], logits[0])
