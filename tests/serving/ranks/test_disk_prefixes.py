"""Prefixes on disk: after a restart a request finds what an earlier server has computed, and gets the tokens and
log-probabilities, to the last bit, that it gets without."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted import Server
from tests.mtp import Oracle
from tests.ranks import run_ranks
from tests.tiny import make_runner, save_tiny, save_tiny_of, tiny_case, write_case
from tests.variants import thorough_but
from umbra.executor.model_runner import ModelRunner
from umbra.serving.ranks.messages import Submit
from umbra.serving.ranks.worker import Worker

KINDS: dict[str, dict[str, Any]] = {"plain": {}}
KINDS |= {"int8": {"cache_config": {"kv_dtype": "int8"}, "quantization": {"method": "q4", "group_size": 32}}}
KINDS |= {"arena": {"offload_config": {"mode": "elastic", "arena_mb": 3, "max_swaps": 4, "measure_s": 0.01}}}
KINDS |= {"states": {"model_name": "qwen3_next"}, "windows": {"model_name": "gpt_oss"}}
KINDS |= {"widths": {"model_name": "gemma4"}}  # of heads, and windows
KINDS |= {"latents": {"model_name": "deepseek_v3", "cache_config": {"kv_dtype": "int8"}}}
KINDS |= {"guesses": {"model_name": "glm4_moe", "draft_config": {"method": "mtp"}}}
LENGTH, TOKENS = 600, 12
draw = random.Random(3)
PROMPT = [draw.randrange(96) for _ in range(LENGTH)]


def save_model(folder: Path, kind: str) -> None:
    family = KINDS[kind].get("model_name")
    if kind == "guesses":
        Oracle(folder, "glm4_moe", max_position_embeddings=1024)
    elif family:
        widths: dict[str, Any] = (
            dict(kv_lora_rank=16, intermediate_size=64) if kind == "latents" else {}
        )  # no prompt is expanded
        widths |= dict(layer_types=2 * ["sliding_attention", "full_attention"]) if kind == "widths" else {}
        save_tiny_of(
            folder, family, num_hidden_layers=5 if kind == "windows" else 4, max_position_embeddings=1024, **widths
        )
    else:
        save_tiny(folder, max_position_embeddings=1024, num_key_value_heads=8, moe_intermediate_size=32)


def runner_of(folder: Path, kind: str) -> ModelRunner:
    options, model = dict(KINDS[kind]), folder / "model"
    if not model.exists():
        save_model(model, kind)
    cache = {"disk_path": str(folder / "pages"), "page_size": 16} | options.pop("cache_config", {})
    data = {"input_max_len": 700, "max_new_tokens": 40, "batch_size": 2, "chunked_prefill_size": 256}
    return make_runner(
        tiny_case(folder, model, exe_mode="graph", threads=1, data_config=data, cache_config=cache, **options), folder
    )


class Restarted(Server):
    """A server whose memory is new; `most` records of a prompt are read in a step."""

    def __init__(self, folder: Path, kind: str, most: int = 0, disk: bool = True):
        super().__init__(runner_of(folder, kind))
        if disk:
            self.worker.open_disk()
        if (prefixes := self.worker.disk) and prefixes.store:
            prefixes.behind.flush(60)
            prefixes.decide = lambda prefill_rate, pause_s: most or 1000  # type: ignore[method-assign]

    def ask(self, ids: list[int], salt: bytes = b"") -> tuple[Any, int]:
        """-> tokens with their log-probabilities, and how many of the prompt were read from disk"""
        submit, id = Submit, len(self.script.sent) + 1
        self.submit(id, ids, TOKENS, logprobs=2)
        self.script.messages[-1] = submit(id, ids, self.script.messages[-1].sampling, salt=salt)
        self.finish()
        rows = self.script.rows(id)
        assert rows[0].cached_tokens >= rows[0].restored_tokens
        return [one for row in rows for one in zip(row.tokens, row.logprobs, strict=True)], rows[0].restored_tokens

    def end(self) -> None:
        worker: Worker = self.worker
        if worker.disk:
            worker.disk.finish(60)
        for cache in worker.loop.scheduler.caches:
            cache.trim(0)
            assert cache.held == cache.kept == cache.sets == 0


@pytest.mark.parametrize("kind", thorough_but(KINDS, "plain", "states", "windows"))
def test_restored_prefixes_change_no_bit(tmp_path: Path, kind: str) -> None:
    plain, short = Restarted(tmp_path, kind, disk=False), PROMPT[:40]
    further = [[*PROMPT[:592], 9], PROMPT[:330] + [7] * 50]
    first, expected = plain.ask(PROMPT)[0], [plain.ask(ids)[0] for ids in further]
    few = plain.ask(short)[0]
    plain.end()
    server = Restarted(tmp_path, kind)
    assert server.ask(PROMPT) == (first, 0)
    assert server.ask(short)[1] == 0
    server.end()
    for most in (1000, 7, 1):
        server = Restarted(tmp_path, kind, most)
        assert server.ask(short, b"other") == (few, 0)
        answers = [server.ask(further[0])]
        server.end()
        server = Restarted(tmp_path, kind, most)
        answers.append(server.ask(further[1]))
        server.end()
        assert [answer for answer, _ in answers] == expected
        assert answers[0][1] >= 16 * (LENGTH // 16 - 1)
        assert answers[1][1] >= (320 if kind != "states" else 0)


@pytest.mark.parametrize("kind", thorough_but(KINDS, "plain"))
def test_wrong_files_are_computed_again(tmp_path: Path, kind: str) -> None:
    plain = Restarted(tmp_path, kind, disk=False)
    expected = plain.ask(PROMPT)[0]
    plain.end()
    chance, restored = random.Random(2), []
    for turn in range(9):
        server = Restarted(tmp_path, kind, most=chance.choice((1000, 5)))
        for path in (tmp_path / "pages").rglob("*.pages") if turn in (2, 4) else ():
            data = bytearray(path.read_bytes())
            for _ in range(2):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        answer, read = server.ask(PROMPT)
        assert answer == expected
        restored.append(read)
        server.end()
    assert restored[0] == 0 < restored[1]
    assert restored[-1] >= 16 * (LENGTH // 16 - 1)
    (tmp_path / "pages/rank0").chmod(0o777)
    server = Restarted(tmp_path, kind)
    assert server.ask(PROMPT) == (expected, 0)


def test_only_salted_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "salted", {"cache_config": {"disk_salted_only": True}})
    for restored in (0, 592):
        server = Restarted(tmp_path, "salted")
        assert server.ask(PROMPT)[1] == 0
        assert server.ask(PROMPT, b"user")[1] == restored
        server.end()


def test_reading_must_beat_computing(tmp_path: Path) -> None:
    server = Server(runner_of(tmp_path, "plain"))
    server.worker.open_disk()
    disk = server.worker.disk
    assert disk
    disk.rate = 1e6
    even = 16 * disk.rate / sum(disk.memory.page_bytes)  # tokens a second that are computed as fast as read
    assert disk.decide(1.2 * even, 0.1) == 0 < disk.decide(0.8 * even, 0.1)
    server.worker.prefill_rate.value = 1.2 * even
    for id in range(5):  # prompts that are computed for that
        server.answer(id, [id] * 40, 1)
        server.worker.prefill_rate.value = 1.2 * even
    assert disk.decide(1.2 * even, 0.1) > 0  # it is tried again


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("attn_tp_size", "loses"), [(2, 1), (1, 0)])
def test_two_ranks_restore_what_both_have(tmp_path: Path, attn_tp_size: int, loses: int) -> None:
    """Ranks that share heads, and two data-parallel groups; then the rank `loses` has lost a part."""
    save_tiny_of(tmp_path / "model", "qwen3_next", num_hidden_layers=4, max_position_embeddings=1024, eos_token_id=None)
    (tmp_path / "prompts").write_text(json.dumps([PROMPT, PROMPT[:330] + [7] * 250, PROMPT + [5] * 9]))
    outcomes = []
    for disk in ("", "pages", "pages", "pages"):
        case = write_case(
            tmp_path / "case.yaml",
            tmp_path / "model",
            exe_mode="graph",
            world_size=2,
            parallel_config={"attn_tp_size": attn_tp_size},
            data_config={"input_max_len": 700, "max_new_tokens": 8, "batch_size": 2},
            model_name="qwen3_next",
            cache_config={"disk_path": disk and str(tmp_path / disk)},
        )
        program = [
            "tests/serving/ranks/restarted_ranks.py",
            str(case),
            str(tmp_path / "prompts"),
            str(tmp_path / "out"),
        ]
        done = run_ranks(tmp_path, 2, program, 300)
        assert done.returncode == 0, done.stdout + done.stderr
        outcomes.append(json.loads((tmp_path / "out").read_text()))
        if len(outcomes) == 3:
            for path in (tmp_path / f"pages/rank{loses}").rglob("*.pages"):
                os.truncate(path, path.stat().st_size // 2)
    assert all(answers == outcomes[0][0] for answers, _ in outcomes)
    assert outcomes[0][1][0] == outcomes[1][1][0] == 0
    assert outcomes[2][1][0] >= 16 * (LENGTH // 16 - 1)
    assert outcomes[3][1][0] < outcomes[2][1][0]
