"""L4, exe_mode acl_graph and npugraph_ex: captured once, then replayed while lengths change; and graphs kept for the
next process."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ascend.engine import (
    CAPTURE_MODES,
    GPT_OSS,
    PROLOG,
    QWEN3,
    V3,
    Family,
    ascend_case,
    ascend_runner,
    generate,
    in_int8,
    prefilled,
)
from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks
from tests.ascend.test_eager import LAYERS, golden, last_layer
from tests.variants import thorough_after, thorough_but


@pytest.fixture(autouse=True)
def as_in_ci() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True):
        yield


def step_log(runner: Any, running: list[Any]) -> list[str]:
    with device_log() as log:
        runner.loop.step()
    return log.lines


@pytest.mark.parametrize("family", thorough_after(1, [QWEN3, GPT_OSS, V3]), ids=str)
@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_captured_once_and_replayed(tmp_path: Path, mode: str, family: Family) -> None:
    """A step is four copies that do not wait, two more for each further set of layers, one replay, and an update
    with the lengths for each layer's attention."""
    copies = [f"memcpy async H2D {size}" for size in (32, 32, 32, 16, *[32, 16] * (family is GPT_OSS))]
    runner = ascend_runner(ascend_case(tmp_path, f"exe_mode={mode}", "strict=true", family=family), tmp_path)
    running = prefilled(runner)
    first = step_log(runner, running)
    kernels = [line.removeprefix("captured ") for line in first if line.startswith("captured acl")]
    names = [line.split()[0] for line in last_layer(kernels)]
    expected = " ".join(line.split()[0] for line in golden("fusion_v2", family))
    # torchair's own fusion: the norm before the router gives its input in float32 as well
    expected = expected.replace("aclnnAddRmsNorm aclnnInplaceCopy", "aclnnAddRmsNormCast")
    assert names == expected.split()  # so caches are not copied either
    for step in (1, 2):
        lines = step_log(runner, running)
        assert lines[: len(copies)] == copies
        assert lines.pop(len(copies)).startswith("replay graph")
        updates, after = lines[len(copies) :][:6], lines[len(copies) + 6 :]
        assert [line.split()[0] for line in updates] == ["task", "update", "task"] * 2
        lengths = ",".join(str(n + step) for n in (5, 2, 24))
        assert all(f"ints({lengths},2)" in line for line in updates if line.startswith("update"))
        # Nothing waits before the tokens are read.
        assert after == ["aclnnArgMax (3,96)bfloat16 (3)int64", "synchronize stream", "memcpy D2H 24"]
    assert runner.engine.decode_step.compiles == 1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_int8_is_captured(tmp_path: Path, mode: str) -> None:
    """A captured layer has the kernels of an eager one."""
    case = ascend_case(tmp_path, f"exe_mode={mode}", "strict=true", family=in_int8(QWEN3))
    runner = ascend_runner(case, tmp_path)
    running = prefilled(runner)
    first = step_log(runner, running)
    names = [line.removeprefix("captured ").split()[0] for line in first if line.startswith("captured acl")]
    assert last_layer(names) == [line.split()[0] for line in LAYERS["int8"]]
    assert len([line for line in step_log(runner, running) if line.startswith("aclnn")]) == 1  # the choice of tokens


def generated(rank: int, folder: Path, family: Family, *overrides: str) -> list[list[int]]:
    """Tokens on a device that computes."""
    from tests.ascend import computing

    computing.start()
    case = ascend_case(folder, *overrides, "max_new_tokens=20", family=family)
    return [sequence.generated for sequence in generate(ascend_runner(case, folder))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "dtype"),  # with sinks in the operator, and by its sums; latents
    [(GPT_OSS, "bfloat16"), (GPT_OSS, "float16"), (V3, "bfloat16"), (PROLOG, "bfloat16")],
    ids=str,
)
def test_every_mode_generates_the_same_tokens(tmp_path: Path, family: Family, dtype: str) -> None:
    modes = "eager", "acl_graph", "npugraph_ex", "ge_graph"
    of = f"model_config.dtype={dtype}"
    runs = [run_ranks(generated, 1, tmp_path, family, f"exe_mode={mode}", of)[0] for mode in modes]
    assert all(tokens == runs[0] for tokens in runs)
    assert {token for tokens in runs[0] for token in tokens} != {0}


def in_int8_generated(rank: int, folder: Path, mode: str) -> list[list[int]]:
    return generated(rank, folder, in_int8(QWEN3), f"exe_mode={mode}")


@pytest.mark.thorough
def test_every_mode_generates_the_same_tokens_in_int8(tmp_path: Path) -> None:
    modes = "eager", "acl_graph", "npugraph_ex", "ge_graph"
    runs = [run_ranks(in_int8_generated, 1, tmp_path, mode)[0] for mode in modes]
    assert all(tokens == runs[0] for tokens in runs)
    assert {token for tokens in runs[0] for token in tokens} != {0}


def started(rank: int, folder: Path, mode: str, overrides: tuple[str, ...]) -> tuple[list[str], int]:
    """(what the compile cache said, compilations) of a process that decodes with graphs kept in `folder`."""
    case = ascend_case(folder, f"exe_mode={mode}", "enable_cache_compile=true", *overrides)
    said = io.StringIO()
    with ge_programs(), contextlib.redirect_stdout(said):
        runner = ascend_runner(case, folder)
        generate(runner)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("compile cache")]
    return lines, runner.engine.decode_step.compiles


@pytest.mark.parametrize("mode", ["ge_graph", *thorough_but(["acl_graph", "npugraph_ex"])])
def test_the_next_process_finds_the_graph(tmp_path: Path, mode: str) -> None:
    ((missed, compiles),) = run_ranks(started, 1, tmp_path, mode, ())
    assert ["miss (no cache yet)" in missed[0], len(missed), compiles] == [True, 1, 1]
    ((hit, compiles),) = run_ranks(started, 1, tmp_path, mode, ())
    assert [hit[0].startswith("compile cache: hit"), len(hit), compiles] == [True, 1, 0]
    if mode == "ge_graph":
        ((changed, compiles),) = run_ranks(started, 1, tmp_path, mode, ("moe_routing=fusion_v1",))
        assert ["moe_routing was" in changed[0], compiles] == [True, 1]
    (kept,) = (tmp_path / "cache").glob("*/rank0of1/forward_4/graph/*/forward_4/compiled_module")
    assert kept.stat().st_mode & 0o777 == 0o600
