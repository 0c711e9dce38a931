"""Sequences come in waves to an arena that cannot hold all experts beside their pages: memory moves between the two,
every sequence ends with the same tokens, whatever the free memory contains, and nothing is captured again."""

import random
from collections.abc import Sequence as ListOf
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.tiny import make_runner, save_tiny, save_tiny_of, tiny_case
from umbra.executor.model_runner import ModelRunner
from umbra.tools.benchmarks.elastic import WaveRequest, serve, swings

pytestmark = pytest.mark.slow

WAVES, BATCH, PROMPT, NEW = (16, 4, 12), 16, (4, 16), (8, 40)
ARENA_MB = 1
NAN = 0xFF  # every byte: not a number in each float type


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 experts of 6 KB; a page of 4 tokens has 8 KB, or 10 KB of latents, the longest sequence 14 pages. The folder
    is named as the family."""
    folder = tmp_path_factory.mktemp("wave") / request.param
    if request.param == "deepseek_v3":  # with a first layer that has no experts
        sizes = dict(n_routed_experts=64, num_hidden_layers=5, kv_lora_rank=120)
        save_tiny_of(folder, "deepseek_v3", eos_token_id=None, **sizes)
    else:
        save_tiny(folder, num_experts=64, num_hidden_layers=4, num_key_value_heads=8)
    return folder


def runner_of(model: Path, **offload: object) -> ModelRunner:
    data = {"input_max_len": PROMPT[1], "max_new_tokens": NEW[1], "batch_size": BATCH}
    sampling = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    offload = {"max_swaps": 4, "shadow_threads": 1, "measure_s": 0.01} | offload
    sections = {"data_config": data, "sampling_config": sampling, "offload_config": offload, "threads": 1}
    case = tiny_case(model.parent, model, model_name=model.name, exe_mode="graph", **sections)
    return make_runner(case, model.parent)


def requests() -> list[list[WaveRequest]]:
    choose = random.Random(4)

    def request() -> WaveRequest:
        return WaveRequest([choose.randrange(96) for _ in range(choose.randint(*PROMPT))], choose.randint(*NEW))

    return [[request() for _ in range(size)] for size in WAVES]


class Watch:
    """Checks the arena after every step: its tenants, and that experts take only frames beyond the pages' reserve."""

    def __init__(self, runner: ModelRunner):
        assert runner.engine.shadows
        self.runner, self.shadows = runner, runner.engine.shadows
        self.end, self.shadows.end = self.shadows.end, self.ended  # type: ignore[method-assign]
        self.start, self.shadows.started = self.shadows.started, self.starts  # type: ignore[method-assign]
        self.size, self.sizes = 0, set[int]()  # of the last batch, and of those that decoded
        self.captured: dict[int, object] = {}  # every graph that there ever was

    def starts(self, tokens: ListOf[int], lengths: ListOf[ListOf[int]]) -> None:
        self.size = sum(lengths[0])
        self.start(tokens, lengths)

    def ended(self, decode: bool, coming: ListOf[int] = ()) -> None:
        arena = self.shadows.arena
        before = arena.slot_frames
        self.sizes |= {self.size} if decode else set()
        self.end(decode, coming)
        if arena.slot_frames > before:
            assert arena.free_frames >= self.shadows.balance.high

    def __call__(self) -> None:
        """Each byte has at most one owner, all owners are within the arena, and what has none becomes garbage."""
        graphs = self.runner.engine.decode_step.graphs.values()  # type: ignore[attr-defined]
        self.captured |= {id(graph): graph for graph in graphs}
        shadows, pool = self.shadows, self.runner.loop.scheduler.pools[0]
        arena, memory = shadows.arena, shadows.device.memory
        begin, frame = memory.data_ptr(), arena.frame_bytes
        units = [b.page for s in self.runner.loop.scheduler.running for b in s.blocks] + [pool.padding]
        owned = [(begin + unit // arena.units * frame, frame) for unit in units]
        owned += [(begin + arena.slot_offset(slot), shadows.slot_bytes) for slot in shadows.slots.values()]
        owned.sort()
        assert owned[0][0] >= begin
        assert owned[-1][0] + owned[-1][1] <= begin + memory.nbytes
        assert all(start + size <= following for (start, size), (following, _) in pairwise(owned))
        assert len(units) + arena.slot_frames + arena.free_frames == arena.frames
        raw, end = memory.view(-1).view(torch.uint8), begin + memory.nbytes
        for (start, size), (following, _) in pairwise([(begin, 0), *owned, (end, 0)]):
            raw[start + size - begin : following - begin] = NAN
        named = sum(int((layer.layer.device != 0).sum()) for layer in shadows.layers)
        assert named + len(shadows.copies) == len(shadows.slots)


def test_waves_pass_through_a_small_arena(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [s.generated for s in serve(runner_of(model, mode="resident"), requests())]
    runner = runner_of(model, mode="elastic", arena_mb=ARENA_MB)
    shadows = runner.engine.shadows
    assert shadows
    shadows.value_copies(1.0, 4)
    watch = Watch(runner)
    for _ in range(2):  # the second time with what was learned
        shadows.forget()
        sequences = serve(runner, requests(), watch)
        assert [s.finish_reason for s in sequences] == ["length"] * sum(WAVES)
        assert [s.generated for s in sequences] == expected
        history, report = shadows.history, shadows.history.report()
        # It was tight: the most experts and the most pages had no room together.
        experts = [step.expert_frames for step in history.steps]
        assert min(experts) < 0.6 * max(experts)
        assert max(experts) + report["most_kv_frames"] > shadows.arena.frames
        assert 0.1 < report["hit_rate"] < 0.99
        # No oscillation. Experts go when a wave comes and return as it ends: each time that the direction changes, the
        # cache has changed by more than the extent between the watermarks. In their places others come, fewer than
        # max_swaps allows.
        assert len(swings(history)) < 2 * len(WAVES)
        assert min(swings(history)) > shadows.arena.extent_frames
        assert report["evictions"] - report["evictions_for_cache"] <= 3 * len(history.steps)
    assert len(watch.captured) == len(watch.sizes)  # one graph for each number of sequences that there was, for good
