"""How the settings that a case leaves open are chosen and what `--plan` prints of them, with measurements made up."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpu_offload.planner.choices import Choice, Split, choose_slots, choose_streaming, choose_swaps, choose_threads
from cpu_offload.planner.model import Line, Planner
from executor.config.case import Case
from executor.config.env import RankEnv
from executor.run import planned_run as times
from executor.run import shadow_choices as module
from executor.run.planned_run import PlannedRun, memory_split, show_offload_plan
from executor.run.shadow_choices import LINK, choose, swaps_of
from tests.executor.run.test_planner import COSTS, SHAPE
from tests.tiny import save_tiny, tiny_case
from umbra.errors import UserError

SPLIT = Split(frames=200, extent_frames=4, extent_slots=8, longest=20, sequences=8, experts=640)
SIZES: Any = SimpleNamespace(blocks="blocks", split=SPLIT, slot_bytes=1000, shape=SHAPE)
RANKS = RankEnv(0, 1, 3, 5, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choosing") / "model"
    save_tiny(folder, num_experts=64, num_hidden_layers=4, num_key_value_heads=8, max_position_embeddings=512)
    return folder


def case_of(model: Path, **offload: Any) -> Case:
    data = {"input_max_len": 48, "max_new_tokens": 400, "batch_size": 4}
    offload = {"mode": "elastic", "arena_mb": 1} | offload
    return tiny_case(model.parent, model, threads=0, data_config=data, offload_config=offload)


def chosen(
    monkeypatch: pytest.MonkeyPatch, case: Case, copy_ms: Any = None, best: int = 3
) -> tuple[Planner, Any, list[Any], dict[tuple[int, int], Planner]]:
    """The planner, the choices, what was started and measured, and all planners by their threads."""
    done: list[Any] = []
    made: dict[tuple[int, int], Planner] = {}
    last: list[int] = []

    def start(*given: Any) -> None:
        done.append(given)
        last[:] = given[:1]

    def measured(case: Case, sizes: Any, shadow: int, memory: str, seconds: float) -> Planner:
        assert (sizes, memory) == (SIZES, "made")
        done.append((shadow, seconds))
        slow = 0.0 if shadow == best else 1.0
        costs = dataclasses.replace(COSTS, base=0.01 + slow, threads=(last[0], shadow))
        made[last[0], shadow] = Planner(SHAPE, costs, rest=2.0)
        return made[last[0], shadow]

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(module, "_measured", measured)
    monkeypatch.setattr(
        module, "made_up", lambda blocks, experts: "made" if (blocks, experts) == ("blocks", 640) else ""
    )
    monkeypatch.setattr(module, "cores_of", lambda rank, ranks: 12 if (rank, ranks) == (3, 5) else 0)
    monkeypatch.setattr(module, "native", SimpleNamespace(teams=lambda: [SimpleNamespace(threads=t) for t in (7, 2)]))
    planner, choices = choose(case, SIZES, RANKS, copy_ms)
    return planner, choices, done, made


def test_threads_are_measured_and_the_best_are_started(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(model, measure_s=0.9)
    planner, choices, done, made = chosen(monkeypatch, case)
    tried = module.divisions(12, 9, False, 0)
    assert len(tried) > 2
    *measured, last = done
    each = 0.9 / len(tried)
    wanted = [x for d, s in tried for x in ((d, case.instruction_set, 3, 5, s), (s, pytest.approx(each)))]
    assert measured == wanted
    assert choices.threads == choose_threads(made, 4, SPLIT.usual_hit)
    assert last == (choices.threads.value[0], case.instruction_set, 3, 5, choices.threads.value[1])
    best = made[choices.threads.value]
    assert planner == dataclasses.replace(best, costs=dataclasses.replace(best.costs, seconds=planner.costs.seconds))
    assert 0 < planner.costs.seconds < 60
    assert choices.slots == Choice(640, "as many as the KV cache leaves room for")
    assert choices.stream_tokens == choose_streaming(planner, SPLIT.usual_hit, 4, 4 * 48)
    assert choices.max_swaps == choose_swaps(planner, 4, SPLIT.usual_hit, case.offload_config.interval)


def test_given_threads_are_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(case_of(model, shadow_threads=2), threads=5)
    _, choices, done, _ = chosen(monkeypatch, case, best=2)
    assert [given for given in done if len(given) == 5] == [(9, case.instruction_set, 3, 5, 2)] * 2
    assert choices.threads.value == (9, 2)


def test_chunks_bound_what_a_prefill_streams(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(model)
    chunked = dataclasses.replace(case, data_config=dataclasses.replace(case.data_config, chunked_prefill_size=16))
    planner, choices, *_ = chosen(monkeypatch, chunked)
    assert choices.stream_tokens == choose_streaming(planner, SPLIT.usual_hit, 4, 16)
    _, choices, *_ = chosen(monkeypatch, case_of(model, stream_tokens=77))
    assert choices.stream_tokens == Choice(77, "given")


def test_hits_are_those_of_the_slots(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = case_of(model, mode="fixed", slots=160, arena_mb=None)
    planner, choices, _, made = chosen(monkeypatch, fixed)
    assert choices.slots == Choice(160, "160 of 640: given")
    assert choices.threads == choose_threads(made, 4, 0.25)
    assert choices.max_swaps == choose_swaps(planner, 4, 0.25, 1)
    whole = case_of(model, mode="resident", arena_mb=None)
    _, choices, _, made = chosen(monkeypatch, whole)
    assert choices.slots == Choice(640, "all 640")
    assert choices.max_swaps == Choice(0, "all experts stay")
    assert choices.threads == choose_threads(made, 4, 1.0)
    small = case_of(model, mode="fixed")
    planner, choices, *_ = chosen(monkeypatch, small)
    assert choices.slots == choose_slots(planner, SPLIT)
    assert choices.max_swaps == choose_swaps(planner, 4, choices.slots.value / 640, 1)
    assert swaps_of(case_of(model, max_swaps=9), planner, 0.5) == Choice(9, "given")


def test_another_device_has_the_shadow_pools_costs_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(case_of(model), platform="ascend")
    planner, choices, done, made = chosen(monkeypatch, case, lambda nbytes: nbytes / 500)
    assert {given[0] for given in done if len(given) == 5} == {1}
    assert all(given[4] == 0 for given in done if len(given) == 5)
    assert choices.threads.value[0] == 0
    shadow = made[1, choices.threads.value[1]].costs
    none = Line(0.0, 0.0, 0.0)
    assert planner.costs == dataclasses.replace(
        shadow, base=0.0, device=none, slip=0.0, copy=2.0, block_bytes=1000, threads=choices.threads.value,
        seconds=planner.costs.seconds,
    )  # fmt: skip
    assert (planner.rest, planner.rest_from) == (0.0, "not known before a run; nor is the device")
    planner, *_ = chosen(monkeypatch, case)
    assert planner.costs.copy == 1000 / LINK


def test_the_plan_of_a_case_is_printed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = case_of(model)
    planner = Planner(SHAPE, COSTS, rest=2.0)
    found = module.Choices(Choice((3, 1), "a"), Choice(640, "b"), Choice(1, "c"), Choice(0, "d"))
    seen: list[Any] = []

    def choose(case: Case, sizes: Any, ranks: RankEnv) -> Any:
        seen.append((sizes, ranks))
        return planner, found

    monkeypatch.setattr(times, "choose", choose)
    monkeypatch.setattr(times, "load_platform", lambda name: lambda *given: seen.append((name, given[1])))
    show_offload_plan(case)
    here = RankEnv(0, 1, 0, case.world_size, "")
    (platform, first), (sizes, second) = seen
    assert (platform, first, second) == ("cpu", here, here)
    arena, pinned = times.make_arena(case, *sizes.frame, sizes.slot_bytes, 640, sizes.sketch.pages, sizes.alignment)
    beside = sizes.fixed_bytes + arena.frames * arena.frame_bytes
    assert capsys.readouterr().out.splitlines() == [
        f"case {case.name}: cpu, offload_config.mode: elastic",
        *memory_split(case, arena, pinned, sizes.sketch.pages, 640, 256),
        f"beside the arena: {sizes.fixed_bytes / 1e6:.1f} MB of other weights, {beside / 1e9:.2f} GB together",
        f"on the host: {256 * sizes.blocks.block_bytes / 1e9:.2f} GB of shadows",
        *planner.table(4), *found.table(),
        "Hit rates depend on the text; even traffic hits as often as its share of experts is resident.",
    ]  # fmt: skip


def test_memory_is_split_between_pages_and_slots(model: Path) -> None:
    arena: Any = SimpleNamespace(frames=101, frame_bytes=5000, slot_bytes=1500, extent_frames=3, extent_slots=10)
    lines = memory_split(case_of(model), arena, 30, 60, 200, 250)
    assert lines == [
        "arena: 0.5 MB, 101 frames of 5000 bytes, each a page of 4 tokens or part of 10 slots in 3 frames",
        "experts: 250 with shadows, 1500 bytes each; 200 may be resident at once",
        "KV pages: 60 for 4 sequence(s) at their longest, 70 can be had",
        "  no sequence         0 pages,    200 slots:  80% of the experts fit",
        "  half as long       30 pages,    200 slots:  80% of the experts fit",
        "  the longest        60 pages,    130 slots:  52% of the experts fit",
    ]
    few = memory_split(case_of(model), arena, 60, 100, 200, 250)
    assert few[2] == "KV pages: 100 for 4 sequence(s) at their longest, 40 can be had: not all sequences run at once"
    assert few[4:] == [
        "  half as long       40 pages,    200 slots:  80% of the experts fit",
        "  the longest        40 pages,    200 slots:  80% of the experts fit",
    ]


def test_more_than_the_device_has_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(case_of(model), platform="ascend")
    sizes = SimpleNamespace(
        sketch=SimpleNamespace(pages=9), split=SPLIT, frame=(1, 1), slot_bytes=1, alignment=1, fixed_bytes=0,
        blocks=SimpleNamespace(block_bytes=1),
    )  # fmt: skip
    arena = SimpleNamespace(frames=1, frame_bytes=case.ascend_config.memory_gb << 30, slot_bytes=1)
    arena.extent_frames = arena.extent_slots = 1
    planner = Planner(SHAPE, COSTS)
    found = module.Choices(Choice((3, 1), "a"), Choice(640, "b"), Choice(1, "c"), Choice(0, "d"))
    monkeypatch.setattr(times, "sizes_of", lambda case: sizes)
    monkeypatch.setattr(times, "choose", lambda *given: (planner, found))
    monkeypatch.setattr(times, "make_arena", lambda *given: (arena, 0))
    show_offload_plan(case)
    sizes.fixed_bytes = 1
    with pytest.raises(UserError, match=r"GB of weights and arena are more than ascend_config\.memory_gb: "):
        show_offload_plan(case)


def test_long_prompts_are_streamed_where_that_is_quicker() -> None:
    run = PlannedRun.__new__(PlannedRun)
    run.planner = Planner(SHAPE, COSTS)
    layers = SHAPE.layers / 1e3
    for first, streamed in ((0, False), (9, False), (8, True), (1, True)):
        run.choices = module.Choices(Choice((3, 1), ""), Choice(1, ""), Choice(1, ""), Choice(first, ""))
        one = run.planner.stream_ms(8, 0.5) if streamed else run.planner.layer_ms(8, 0.5)
        assert run.prompt_step_s(8, 0.5) == pytest.approx(layers * one)
