"""Guesses of a model's own layer on Ascend: its steps as graphs, beside those of the model that check them."""

import contextlib
import dataclasses
import io
import os
import shutil
from collections import Counter
from collections.abc import Sequence as ListOf
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ascend.engine import (
    CAPTURE_MODES,
    GLM,
    HYBRID,
    PROMPTS,
    V3,
    Family,
    ascend_case,
    ascend_runner,
    generate,
    prefilled,
)
from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks
from tests.ascend.test_eager import golden
from tests.ascend.test_hccl import SPLITS
from tests.ascend.test_recurrent import ATTENTION, BLOCK
from tests.ascend.workers import close_nodes
from tests.fakes.drafts import FreeDrafts, HalfRight
from tests.mtp import KINDS, Oracle
from tests.tiny import write_case
from tests.variants import thorough_after, thorough_but
from umbra.base.files import ROOT
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import Grammar, Request, SamplingParams
from umbra.executor.engine.step.loop import Loop
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.ascend.environment import ascend_environment

MTP = "strict=true", "draft_config.method=mtp", "draft_config.tokens=3"

SAMPLINGS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "seed": 6, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 1, "grammar": Grammar("regex", "[a-z ,;]{200,}")},
]


def with_layer(family: Family) -> Family:
    """The same with a layer that guesses tokens."""
    layers = {"layer_types": KINDS, "num_hidden_layers": 3} if family.name == HYBRID.name else {"num_hidden_layers": 2}
    return dataclasses.replace(family, save=partial(Oracle, family=family.name), sizes=family.sizes | layers)


def answers(
    rank: int, folder: Path, mode: str, family: Family, texts: ListOf[list[int]], split: ListOf[str] = (), size: int = 1
) -> tuple[list[list[int]], dict[tuple[int, ...], list[int]], int]:
    """Prompts and answers, the guesses after each step, and how many drafts came true."""
    from tests.ascend import computing

    computing.start()
    drafting = MTP if texts else ()
    more = f"world_size={size}", f"exe_mode={mode}", "max_new_tokens=14", *drafting, *split
    case = ascend_case(folder, *more, family=with_layer(family))
    os.environ.update(ascend_environment(platform_settings(case), {}))
    runner = ascend_runner(case, folder, RankEnv(rank, size, rank, size, ""))
    drafts = HalfRight(texts)
    if texts:
        runner.loop.scheduler.drafts = drafts
    tokens = [prompt + s.generated for prompt, s in zip(PROMPTS, generate(runner), strict=True)]
    if texts and mode != "eager":
        for graphs in (runner.engine.decode_step, runner.loop.speculation.drafter.captured):  # type: ignore[union-attr]
            captured: Any = graphs
            assert len(captured.graphs) > 1
    return tokens, drafts.seen, runner.loop.timings.accepted_tokens


@pytest.mark.parametrize("family", thorough_but((GLM, HYBRID, V3), GLM), ids=str)
@pytest.mark.parametrize("mode", thorough_but(["acl_graph", "npugraph_ex", "ge_graph"], "acl_graph"))
def test_tokens_are_those_without_drafts(tmp_path: Path, mode: str, family: Family) -> None:
    ((texts, *_),) = run_ranks(answers, 1, tmp_path, "eager", family, [])
    ((tokens, guesses, _),) = run_ranks(answers, 1, tmp_path, "eager", family, texts)
    assert tokens == texts
    ((tokens, again, accepted),) = run_ranks(answers, 1, tmp_path, mode, family, texts)
    assert (tokens, again) == (texts, guesses)
    assert accepted > 8


def served(
    rank: int, folder: Path, mode: str, family: Family, texts: ListOf[list[int]]
) -> tuple[list[list[int]], int, int]:
    """Prompts and answers of a server, accepted drafts, and how often a sequence was preempted."""
    from tests.ascend import computing

    computing.start()
    model = folder / "model"
    more = f"exe_mode={mode}", "input_max_len=264", "serve_config.reserve=0", "model_config.dtype=float16"
    drafting = MTP if texts else ()
    case = ascend_case(
        folder, *more, *drafting, family=with_layer(family), vocab_size=4096, max_position_embeddings=512
    )
    for file in (ROOT / "checkpoints" / "austen_hybrid").glob("tokenizer*"):
        shutil.copy(file, model)
    loop = Loop(ascend_runner(case, folder).engine, frozenset(), serving=True)
    if texts:
        loop.scheduler.drafts = HalfRight(texts)
    (pool,), preempted, tokens = loop.scheduler.pools, 0, list[list[int]]()
    prompts = [[(7 * i + 31 * position) % 4000 for position in range(115)] for i in range(3)]
    for turn in range(2):
        asked = [
            loop.submit(Request(tuple(ids), SamplingParams(max_tokens=30, **sampling)))
            for ids, sampling in zip(prompts, SAMPLINGS, strict=True)
        ]
        for _ in range(3):
            loop.step()
        if turn and family.name == GLM.name:  # prompts of the others, computed again, are rounded otherwise
            pool.pages = loop.scheduler.committed(0) + 2  # of three that will be needed
        while not loop.idle:
            loop.step()
        prompts = [[*s.ids, *range(95)] for s in asked]
        tokens += [s.ids.tolist() for s in asked]
        preempted += sum(s.preemptions for s in asked)
    assert all(s.cached_tokens for s in asked)
    return tokens, loop.timings.accepted_tokens, preempted


@pytest.mark.thorough
@pytest.mark.parametrize("family", [GLM, HYBRID, V3], ids=str)
@pytest.mark.parametrize("mode", ["acl_graph", "ge_graph"])
def test_sampled_tokens_are_too(tmp_path: Path, mode: str, family: Family) -> None:
    """With penalties and a grammar, after preemption, and behind cached prefixes. In float16, since draws fall to the
    other side of bfloat16's roundings, which forms of attention and of recurrence differ by."""
    ((texts, _, _),) = run_ranks(served, 1, tmp_path, "eager", family, [])
    ((tokens, accepted, preempted),) = run_ranks(served, 1, tmp_path, mode, family, texts)
    assert tokens == texts
    assert (accepted > 20, preempted > 0) == (True, family is GLM)


def kernels(lines: list[str]) -> list[str]:
    ops = (line.removeprefix("captured ").split()[0] for line in lines)
    return [name.removeprefix("aclnn") for name in ops if name.startswith("aclnn")]


@pytest.mark.thorough
@pytest.mark.parametrize("family", thorough_after(1, [GLM, HYBRID, V3]), ids=str)
@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_nothing_waits_between_guesses(tmp_path: Path, mode: str, family: Family) -> None:
    """Each guess is copies that do not wait, those of hidden states and guessed tokens on the device, and a replay."""
    torch._dynamo.reset()
    more = f"exe_mode={mode}", "max_new_tokens=40"
    runner = ascend_runner(ascend_case(tmp_path, *more, *MTP, family=with_layer(family)), tmp_path)
    runner.loop.scheduler.drafts = FreeDrafts(3)
    prefilled(runner)
    with device_log() as log:
        runner.loop.step()
    _, verify, _, first, _, further = (
        [line for line in part.splitlines() if line.startswith("captured acl")]
        for part in "\n".join(log.lines).split("capture end")[:6]
    )
    if family is HYBRID:
        layer, after = [*ATTENTION, *BLOCK], "InplaceAdd"
    else:
        norm, *layer = (line.split()[0].removeprefix("aclnn") for line in golden("fusion_v2", family))
        after = "AddRmsNormCast"
        layer = [*" ".join(layer).replace("AddRmsNorm InplaceCopy", after).split(), norm]
    tables, head = ["Embedding"] * 3, "MatmulWeightNz"
    checked = kernels(verify)
    assert (checked[:4], checked[-len(layer) - 1 :]) == ([*tables, "RmsNorm"], [*layer, head])
    assert len(checked) == 5 + len(layer) or family is HYBRID  # of which it is the last one of two layers
    both = [*tables, "RmsNorm", "RmsNorm", "Cat", "MatmulWeightNz", "RmsNorm", *layer, head, "ArgMax"]
    assert kernels(further) == both
    at = both.index(after)
    assert kernels(first) == [*both[:at], "IndexSelect", "IndexSelect", *both[at:]]
    with device_log() as log:
        runner.loop.step()
    lines = [line for line in log.lines if "memcpy async" not in line and "task" not in line and "update" not in line]
    taken = ["aclnnInplaceCopy (4)int64 (4)int64", *["aclnnInplaceCopy (4,128)bfloat16 (4,128)bfloat16"]]
    expected = ["replay", "aclnnArgMax (12,96)bfloat16 (12)int64", "synchronize stream", "memcpy D2H 96"]
    expected += ["aclnnInplaceCopy (16,128)bfloat16 (16,128)bfloat16", "replay", *[taken[0], *taken, "replay"] * 2]
    expected += [taken[0], "aclnnStack [(4)int64 (4)int64 (4)int64] (4,3)int64", "synchronize stream", "memcpy D2H 72"]
    assert ["replay" if line.startswith("replay") else line for line in lines] == expected


@pytest.mark.thorough
def test_guesses_in_ge_copy_nothing(tmp_path: Path) -> None:
    more = "exe_mode=ge_graph", "max_new_tokens=8"
    runner = ascend_runner(ascend_case(tmp_path, *more, *MTP, family=with_layer(GLM)), tmp_path)
    runner.loop.scheduler.drafts = FreeDrafts(3)
    with ge_programs() as programs:
        prefilled(runner)
        runner.loop.step()
    verify, first, further = programs
    assert [[out.shape for out in program.outputs()] for program in (first, further)] == [[(4,), (4, 128)]] * 2
    more_nodes = Counter(RmsNorm=2, MatMul=1, ConcatV2=1, ArgMaxV2=1)
    for program, picked in ((first, 2), (further, 0)):
        added = program.count() - verify.count()
        added = Counter({name: count for name, count in added.items() if name not in ("Const", "Data")})
        assert added == more_nodes + Counter(GatherV2=picked)
        assert not program.of("TensorMove", "Transpose", "Identity", "TensorScatterUpdate")


def on_two_ranks(rank: int, folder: Path, mode: str, texts: ListOf[list[int]], *split: str) -> tuple[Any, ...]:
    return answers(rank, folder, mode, GLM, texts, split, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("split", ["dp", "tp"])
def test_two_ranks(tmp_path: Path, split: str) -> None:
    """Groups of different sizes take steps of the same: the prompts of one are two."""
    ascend_case(tmp_path, family=with_layer(GLM))
    ((texts, *_), _) = run_ranks(on_two_ranks, 2, tmp_path, "eager", [], *SPLITS[split])
    for mode in ("acl_graph", "ge_graph"):
        for tokens, _, accepted in run_ranks(on_two_ranks, 2, tmp_path, mode, texts, *SPLITS[split]):
            assert tokens == texts
            assert accepted > 8


def beside_shadows(rank: int, folder: Path, texts: ListOf[list[int]]) -> tuple[Any, ...]:
    try:
        shadows = "offload_config.mode=fixed", "offload_config.start_layer=0", "stream_tokens=0"
        return answers(rank, folder, "acl_graph", GLM, texts, shadows)
    finally:
        close_nodes()


@pytest.mark.thorough
def test_beside_shadow_experts(tmp_path: Path) -> None:
    """The layer's own experts are all on the device."""
    ((texts, *_),) = run_ranks(beside_shadows, 1, tmp_path, [])
    ((tokens, _, accepted),) = run_ranks(beside_shadows, 1, tmp_path, texts)
    assert tokens == texts
    assert accepted > 8


def trained(rank: int, folder: Path, mode: str, drafts: bool) -> tuple[list[list[int]], int, list[str], int]:
    """Tokens of the demo, accepted drafts, what the compile cache said, and compilations."""
    from tests.ascend import computing

    computing.start()
    data = {"prompts": ["x"], "batch_size": 3, "input_max_len": 48, "max_new_tokens": 16}
    path = write_case(
        folder / "case.yaml",
        ROOT / "checkpoints" / "austen_hybrid",
        model_name="qwen3_5_moe",
        platform="ascend",
        model_config={"dtype": "bfloat16"},
        cache_config={"page_size": 128},
        data_config=data,
    )
    said = io.StringIO()
    more = "ignore_eos=true", f"exe_mode={mode}", *((*MTP, "enable_cache_compile=true") if drafts else ())
    with contextlib.redirect_stdout(said):
        runner = ascend_runner(load_case(str(path), list(more)), folder)
        if drafts:
            runner.loop.scheduler.drafts = FreeDrafts(3)
        tokens = [s.generated for s in generate(runner)]
    compiles = getattr(runner.engine.decode_step, "compiles", 0)
    cache = [line for line in said.getvalue().splitlines() if line.startswith("compile cache")]
    return tokens, runner.loop.timings.accepted_tokens, cache, compiles


@pytest.mark.thorough
def test_a_trained_layer_and_graphs_of_the_next_process(tmp_path: Path) -> None:
    ((plain, *_),) = run_ranks(trained, 1, tmp_path, "eager", False)
    ((tokens, accepted, missed, _),) = run_ranks(trained, 1, tmp_path, "acl_graph", True)
    ((again, _, hits, compiles),) = run_ranks(trained, 1, tmp_path, "acl_graph", True)
    assert plain == tokens == again
    assert accepted > 8
    assert all("miss" in line for line in missed)
    assert len(hits) == len(missed)
    assert ("miss" in "".join(hits), compiles) == (False, 0)
