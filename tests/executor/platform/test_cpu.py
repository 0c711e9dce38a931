"""The CPU platform: what it refuses, how it starts the engine, its graphs, and what platforms have in common."""

import contextlib
import dataclasses
import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from executor import platform as platforms
from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.config.platforms import PLATFORMS
from executor.launch.platform_settings import platform_settings
from executor.platform import cpu as module
from executor.platform import load_platform, start_environment
from executor.platform.ascend.compile_cache import CACHE
from executor.platform.base import graph_rows
from executor.platform.cpu import CpuExchange, CpuPlatform, GraphStep
from models.batch import Batch
from ops import load_ops
from ops.interface import Paged
from ops.parallel.partitions import ParallelSizes
from tests.tiny import ONE_RANK
from umbra.errors import UserError

SHADOWS = ("exe_mode=graph", "offload_config.mode=resident")


@pytest.mark.parametrize(
    ("key", "overrides"), [("threads", ()), ("shadow_threads", SHADOWS)], ids=["threads", "shadow_threads"]
)
def test_absurd_numbers_of_threads_are_refused(
    key: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5})
    case = load_case("demo", [f"{key}=1000", *overrides])
    with pytest.raises(UserError, match=f"^case demo: {key}: 1000 are more than 16 for each of the 3 CPUs that this"):
        CpuPlatform(platform_settings(case), ONE_RANK)


class Started:
    """The engine's start with what it is given; `cpus` are those of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int = 2):
        self.given: list[Any] = []
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cpus)) if process == 0 else set())
        monkeypatch.setattr(torch, "set_num_threads", lambda count: self.given.append(count))
        monkeypatch.setattr(module, "start", self.start)
        monkeypatch.setattr(module, "placement", lambda: "2 threads")

    def start(self, *given: Any) -> str:
        self.given.append(given)
        return "avx2"


RANKS = RankEnv(rank=5, world_size=8, local_rank=1, local_world_size=4, error_file="")


@pytest.mark.parametrize(
    ("overrides", "started"),
    [((), (0, "auto", 1, 4, 0)), (("threads=32",), (32, "auto", 1, 4, 0)),
     (("threads=3", "instruction_set=avx2", "shadow_threads=32", *SHADOWS), (3, "avx2", 1, 4, 32))],
)  # fmt: skip
def test_the_engine_is_started_as_the_case_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], started: Any
) -> None:
    """Sixteen threads for each of two CPUs are taken."""
    found = Started(monkeypatch)
    platform = CpuPlatform(platform_settings(load_case("demo", [*overrides])), RANKS)
    assert found.given == [1, started]
    assert capsys.readouterr().out == "native CPU kernels: avx2, 2 threads\n"
    assert platform.exchange(CONFIG) is None
    assert (platform.device, platform.quantised_head, platform.ops) == (torch.device("cpu"), True, load_ops("cpu"))


@pytest.mark.parametrize("key", ["threads", "shadow_threads"])
def test_one_thread_too_many_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    Started(monkeypatch)
    with pytest.raises(UserError, match=f"{key}: 33 are more than 16 for each of the 2 CPUs"):
        CpuPlatform(platform_settings(load_case("demo", [f"{key}=33", *SHADOWS])), RANKS)


CONFIG: Any = "config"


def test_what_a_cpu_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    Started(monkeypatch)
    settings = platform_settings(load_case("demo", []))
    platform = CpuPlatform(settings, RANKS)
    device: Any = platform.shadow_device(8, 128)
    assert (device.stream_tokens, device.decode_tokens) == (128, settings.decode_rows)
    step: Any = "step"
    compiled: Any = platform.compile(step, CONFIG)
    assert (type(compiled), compiled.step, compiled.graphs) == (GraphStep, "step", {})
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 if who == 0 else 0))
    assert platform.peak_memory_bytes() == 3072
    placed = CpuPlatform(dataclasses.replace(settings, sizes=ParallelSizes(expert_slots=1)), RANKS)
    exchange: Any = placed.exchange(CONFIG)
    assert isinstance(exchange, CpuExchange)
    # What a platform has unless it says otherwise:
    model: Any = None
    assert (platform.kernels(model), platform.group_options("world"), platform.padded_rows(7)) == ({}, None, 0)
    with platform.watched() as watched:
        assert watched is None
    with pytest.raises(NotImplementedError):
        platform.copy_ms(1)


def test_rows_of_a_decode_graph_are_powers_of_two_up_to_a_whole_batch() -> None:
    assert [graph_rows(rows, 6) for rows in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
    assert [graph_rows(rows, 64) for rows in (1, 8, 9, 33, 64)] == [1, 8, 16, 64, 64]
    settings = platform_settings(load_case("demo", []))
    for world, attn_tp, rows in ((8, 2, 3), (4, 4, 12)):
        sized = dataclasses.replace(settings, decode_rows=12, sizes=ParallelSizes(world, attn_tp))
        assert sized.group_rows == rows


class Tape:
    """Counts captures and replays."""

    done: ClassVar[list[str]] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.done.append("capture")
        yield

    def replay(self) -> None:
        self.done.append("replay")


def test_each_size_of_a_step_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Tape", Tape)
    Tape.done.clear()
    seen: list[Any] = []

    def step(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.token_ids.float()

    def batch_of(first: int, groups: tuple[int, ...] | None) -> Batch:
        ids = torch.arange(first, first + 2)
        return Batch(ids, ids + 1, Paged(ids + 2, ids[:, None], ids + 3, ids + 4), None, groups)

    graphs = GraphStep(step)
    batch = batch_of(10, (2, 3))
    assert graphs(batch).tolist() == [10.0, 11.0]
    assert seen[0].token_ids is not batch.token_ids  # inputs of a graph keep their own addresses
    found = graphs(batch_of(20, (2, 3)))
    assert found.tolist() == [10.0, 11.0]  # a replay writes in place; this tape does not
    assert seen[0].token_ids.tolist() == [20, 21]
    assert seen[0].positions.tolist() == [21, 22]
    graphs(batch_of(30, (3, 2)))
    graphs(batch_of(40, None))
    graphs(batch_of(50, None))
    assert list(graphs.graphs) == [(2, 3), (3, 2), ()]
    assert Tape.done == ["capture", "replay", "capture", "capture", "replay"]
    assert len(seen) == 3


def test_a_platform_is_loaded_by_its_name() -> None:
    assert load_platform("cpu") is CpuPlatform
    settings: Any = SimpleNamespace()
    assert start_environment("cpu", settings, {"A": "1"}) == {}


def test_an_environment_is_asked_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "load", lambda place: lambda *given: {"place": place, "given": given})
    settings: Any = "settings"
    given = {"A": "1"}
    found: Any = start_environment("ascend", settings, given)
    assert found == {"place": PLATFORMS["ascend"].environment, "given": ("settings", given)}


def test_the_settings_of_a_platform_are_those_of_its_case() -> None:
    case = load_case("demo", ["threads=3"])
    found = platform_settings(case)
    assert found.graphs is None
    kept = dataclasses.replace(case.model_config, enable_cache_compile=True)
    assert platform_settings(dataclasses.replace(case, model_config=kept)).graphs == CACHE
    assert (found.case, found.threads, found.shadow_threads) == ("demo", 3, None)
    assert (found.exe_mode, found.dtype, found.strict) == (case.exe_mode, case.model_config.dtype, case.strict)
    assert (found.sizes, found.decode_rows) == (case.parallel_sizes, case.decode_rows)
    assert "description" not in found.graph_facts
    assert "prompts" not in cast(dict[str, Any], found.graph_facts["data_config"])
    shadowed = platform_settings(load_case("demo", ["shadow_threads=2", "offload_config.timeout_s=7", *SHADOWS]))
    assert (shadowed.shadow_threads, shadowed.shadow_timeout_s) == (2, 7)
