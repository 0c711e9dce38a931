"""What a memory plan prints and refuses, with sizes that are made up, and what fits into a machine's memory."""

import dataclasses
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.config.load import load_case
from executor.run import host_memory
from executor.run import planned_run as timing
from executor.run.activations import CountedGroup, Made, Moment, batch_of, parts_of, sampling
from executor.run.ascend_memory_plan import Plan
from executor.run.host_memory import check_host_memory
from executor.run.memory_report import check_fits, print_plan
from executor.run.parts import Part, product
from executor.run.planned_run import PlannedRun, memory_split, steps_of
from executor.run.shadow_choices import _slots, _usual_hit, swaps_of
from ops.interface import Paged
from umbra.errors import UserError

GB = 1 << 30
ASCEND = ["platform=ascend", "exe_mode=eager", "memory_gb=4"]


def plan(*overrides: str, weights: int = GB, cache: int = GB // 2) -> Plan:
    case = load_case("demo", [*ASCEND, *overrides])
    sections = {"weights": [Part("a", weights - 5), Part("b", 5, "5 x 1 B")], "KV cache": [Part("pages", cache)],
                "allowance": [Part("empty", 0)]}  # fmt: skip
    return Plan(case, sections, 1000, [Part("rest", 7 * GB), Part("nothing", 0)])


def test_a_plan_adds_up() -> None:
    made = plan("method=none")
    assert (made.of("weights"), made.of("KV cache"), made.total) == (GB, GB // 2, 3 * GB // 2)
    assert made.left == 5 * GB // 2
    assert made.tokens_left == 5 * GB // 2 // 1000 * 128
    assert plan("method=none", weights=5 * GB).tokens_left == 0
    assert product("x", rows=1000, B_a_token=3) == Part("x", 3000, "1,000 rows x 3 B a token")


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan("method=none"))
    assert capsys.readouterr().out == (
        "case demo: ascend, eager, 1 rank(s), bfloat16\n"
        "Memory of one rank, counted, not measured. Splits are even: rank 0 stands for all. 1 GB = 2^30 bytes.\n"
        "\n"
        "weights                                   1,073,741,824    1.000 GB\n"
        "  a                                       1,073,741,819    1.000 GB\n"
        "  b                                                   5    0.000 GB  5 x 1 B\n"
        "\n"
        "KV cache                                    536,870,912    0.500 GB\n"
        "  pages                                     536,870,912    0.500 GB\n"
        "\n"
        "allowance                                             0    0.000 GB\n"
        "  empty\n"
        "\n"
        "total                                     1,610,612,736    1.500 GB\n"
        "ascend_config.memory_gb: 4                4,294,967,296    4.000 GB\n"
        "left                                      2,684,354,560    2.500 GB  343,597,312 more tokens of KV cache\n"
        "\n"
        "A decode step of 4 sequence(s) reads on each rank:\n"
        "  rest                                    7,516,192,768    7.000 GB\n"
        "  nothing\n"
        "in all                                    7,516,192,768    7.000 GB\n"
    )


@pytest.mark.parametrize(
    ("overrides", "format"),
    [
        (["method=auto"], "bfloat16"),
        (["method=q4"], "bfloat16, q4 in groups of 32"),
        (["method=q4", "zero_points=true", "group_size=64"], "bfloat16, q4 in groups of 64 with zero points"),
        (["method=none", "dtype=float16"], "float16"),
    ],
)
def test_the_format_of_a_plan(capsys: pytest.CaptureFixture[str], overrides: list[str], format: str) -> None:
    print_plan(plan(*overrides))
    assert capsys.readouterr().out.splitlines()[0] == f"case demo: ascend, eager, 1 rank(s), {format}"


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    full = plan("method=none", weights=2 * GB, cache=2 * GB)
    check_fits(full)
    print_plan(full)
    assert (
        "left                                                  0    0.000 GB  does not fit\n" in capsys.readouterr().out
    )
    with pytest.raises(UserError) as caught:
        check_fits(plan("method=none", weights=2 * GB, cache=3 * GB))
    assert str(caught.value) == (
        "case demo: 5.00 GB are 1.00 GB more than ascend_config.memory_gb: 4; the largest share is KV cache with "
        "3.00 GB: lower batch_size, input_max_len or max_new_tokens"
    )


def test_ranks_may_fill_the_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    case, room = load_case("demo"), [0]
    sketch = SimpleNamespace(model="model")
    monkeypatch.setattr(host_memory, "sketch_of", lambda case: sketch)
    monkeypatch.setattr(host_memory, "weights_of", lambda model: [Part("a", 3 * GB), Part("b", GB)])
    monkeypatch.setattr(host_memory, "cache_of", lambda model, page_size: Part("pages", page_size * GB // 8))
    monkeypatch.setattr(host_memory, "_program_bytes", lambda: GB)
    monkeypatch.setattr(host_memory, "memory_limit", lambda: (room[0], "here"))
    shadows = dataclasses.replace(case.offload_config, mode="elastic", arena_mb=512.0)
    for config, ranks, needed in (
        (case.offload_config, 3, 3 * 7 * GB),
        (shadows, 3, 3 * 5.5 * GB),
        (dataclasses.replace(shadows, mode="none"), 1, 7 * GB),
        (dataclasses.replace(shadows, arena_mb=None), 1, 7 * GB),
    ):
        of = dataclasses.replace(case, offload_config=config)
        room[0] = int(needed)
        check_host_memory(of, ranks)
        room[0] -= 1
        with pytest.raises(UserError, match=rf"4\.00 GB of weights, .* on each of {ranks} rank\(s\) do not fit"):
            check_host_memory(of, ranks)
    with pytest.raises(UserError) as caught:
        check_host_memory(case, 2)
    assert str(caught.value) == (
        "case demo: 4.00 GB of weights, 2.00 GB of KV cache and 1.00 GB of program on each of 2 rank(s) do not fit "
        "into the 7.00 GB of here: --set quantization.method=q4, or lower batch_size or input_max_len"
    )


def test_tensors_of_a_moment_are_named_and_added() -> None:
    made = [
        Made("model.layers.3.mlp", "rows", (2, 3), 4, 24), Made("model.layers.4.mlp", "rows", (2, 3), 4, 24),
        Made("model.layers.4.mlp", "rows", (5,), 2, 10), Made("model.layers.4", "sum", (1000,), 2, 2000),
        Made("model.rotary", "rows", (), 8, 8),
    ]  # fmt: skip
    parts = parts_of(made)
    assert parts == [
        Part("mlp: rows", 58, "2 tensors x 2 x 3 x 4 B + 5 x 2 B"),
        Part("a layer: sum", 2000, "1,000 x 2 B"),
        Part("model.rotary: rows", 8, "8 B"),
    ]
    assert Moment("now", parts).nbytes == 2066


def test_tokens_are_chosen_from_copies_of_logits() -> None:
    assert sampling(100, 3, 2) == Moment(
        "the choice of tokens",
        [
            Part("logits", 1200, "2 copies x 3 sequences x 100 columns x 2 B"),
            Part("float32", 1200, "3 sequences x 100 columns x 4 B"),
        ],
    )


def test_collectives_of_one_rank_have_the_shapes_of_all() -> None:
    group, x = CountedGroup(0, 4), torch.zeros(8, 3)
    assert group.all_reduce(x) is x
    assert group._gather(x).shape == (4, 8, 3)
    assert group._sum_parts(x).shape == (2, 3)


def test_a_batch_on_meta() -> None:
    paged: Any = []

    def paging(*given: Any) -> Any:
        paged.append(given)
        return Paged(torch.zeros(9, 2, dtype=torch.int32), torch.zeros(9, 5, dtype=torch.int16), (), ())

    ops: Any = SimpleNamespace(paging=paging)
    batch = batch_of(ops, 12, 3, 5, 16, 2)
    [(ones, table, *others, size)] = paged
    assert (ones, table.shape, table.dtype, others, size) == (array("q", [1]), (1, 5), torch.int64, [ones, ones], 16)
    assert [t.shape for t in (batch.token_ids, batch.positions, batch.logit_rows)] == [(12,), (12,), (3,)]  # type: ignore[union-attr]
    assert (batch.paged.slot_mapping.shape, batch.paged.slot_mapping.dtype) == ((12, 2), torch.int32)
    assert (batch.paged.block_tables.shape, batch.paged.block_tables.dtype) == ((3, 5), torch.int16)
    assert all(tensor.is_meta for tensor in batch.tensors().values())
    assert (*batch.paged[2:], batch.tokens_per_group) == ((0, 4, 8, 12), (4, 4, 4), (12, 12))
    assert batch_of(ops, 3, 3, 5, 16, None).tokens_per_group is None


def test_choices_that_a_case_leaves_open() -> None:
    split: Any = SimpleNamespace(experts=40, usual_hit=0.25)
    planner: Any = None

    def found(mode: str, **more: str) -> tuple[float, int | None, str]:
        case = load_case("demo", [f"offload_config.mode={mode}", *(f"{k}={v}" for k, v in more.items())])
        try:
            slots = _slots(case, planner, split)
        except AttributeError:  # the planner is asked
            return _usual_hit(case, split), None, ""
        return _usual_hit(case, split), slots.value, slots.why

    assert found("elastic") == (0.25, 40, "as many as the KV cache leaves room for")
    assert found("resident") == (1.0, 40, "all 40")
    assert found("fixed") == (0.25, 40, "all 40")
    assert found("fixed", slots="10") == (0.25, 10, "10 of 40: given")
    assert found("fixed", slots="30") == (0.75, 30, "30 of 40: given")
    assert found("fixed", slots="-1") == (0.0, 0, "0 of 40: given")
    assert found("fixed", arena_mb="5") == (0.25, None, "")
    assert found("resident", arena_mb="5") == (1.0, 40, "all 40")
    still = swaps_of(load_case("demo", ["offload_config.mode=resident"]), planner, 1.0)
    assert (still.value, still.why) == (0, "all experts stay")
    given = swaps_of(load_case("demo", ["offload_config.mode=elastic", "max_swaps=3"]), planner, 1.0)
    assert given.value == 3


def history(*steps: tuple[list[int], list[int]], long: Any = ()) -> Any:
    made = [SimpleNamespace(hits=torch.tensor(hits), misses=torch.tensor(misses)) for hits, misses in steps]
    return SimpleNamespace(steps=made, long=long)


def test_steps_have_tokens_and_hit_rates() -> None:
    shape: Any = SimpleNamespace(layers=2, top_k=3)
    found = steps_of(history(([6, 3], [2, 1]), ([0, 0], [0, 0]), ([0, 1], [3, 2])), [0.5, 0.25, 1.0], shape)
    assert found == [(2.0, 0.75, 500.0), (0.0, 1.0, 250.0), (1.0, pytest.approx(1 / 6), 1000.0)]


@dataclasses.dataclass
class Costs:
    base: float = 1.5


def planned(**choices: Any) -> Any:
    """With a planner that says what it is asked."""

    @dataclasses.dataclass(frozen=True)
    class One:
        value: int

    @dataclasses.dataclass(frozen=True)
    class All:
        slots: One
        max_swaps: One
        stream_tokens: One

        def table(self) -> list[str]:
            return [f"swaps {self.max_swaps.value}"]

    @dataclasses.dataclass(frozen=True)
    class Planned:
        rest: float = 0.0
        rest_from: str = "before"
        shape: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(layers=2, top_k=1))
        costs: Costs = dataclasses.field(default_factory=Costs)
        swap_cost: str = "cost"

        def rest_of(self, steps: Any) -> float:
            return float(len(steps))

        def compare(self, steps: Any) -> Any:
            return {"hit_rate": 0.5, "predicted_ms": 1.25, "measured_ms": 2.5, "ratio": 2.0}

        def compare_long(self, long: Any) -> Any:
            return {"streamed_ms": 1.0, "computed_ms": 2.0, "measured_ms": 3.0, "layers": 4, "tokens": 5.4,
                    "streamed_layers": 6}  # fmt: skip

        def table(self, batch: int) -> list[str]:
            return [f"batch {batch}, rest {self.rest} {self.rest_from}"]

        def stream_ms(self, tokens: float, hit: float) -> float:
            return 1000 + tokens + hit

        def layer_ms(self, tokens: float, hit: float) -> float:
            return 2000 + tokens + hit

    run: Any = PlannedRun.__new__(PlannedRun)
    run.case, run.planner = load_case("demo"), Planned()
    run.choices = All(One(9), One(choices.get("swaps", 1)), One(choices.get("stream", 0)))
    run.one = One
    return run


def test_a_run_learns_from_its_warm_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, told, swaps in ((3, "rest 2.0 measured in 2 steps of the warm-up", 8), (1, "rest 0.0 before", 1)):
        run, done = planned(), list[Any]()
        monkeypatch.setattr(timing, "swaps_of", lambda case, planner, hit, run=run: run.one(int(16 * hit)))
        offload: Any = SimpleNamespace(
            history=history(*[([1, 1], [0, 0])] * steps), value_copies=lambda *given, done=done: done.append(given),
            forget=lambda done=done: done.append("forget"),
        )  # fmt: skip
        run.begin(offload, [0.1] * steps)
        assert done == [("cost", swaps), "forget"]
        assert capsys.readouterr().out == f"batch 4, {told}\nswaps {swaps}\n"


def test_long_steps_stream_from_some_number_of_tokens_on() -> None:
    for stream, tokens, streamed in ((0, 5, False), (5, 5, True), (5, 4, False), (5, 6, True)):
        found = planned(stream=stream).prompt_step_s(float(tokens), 0.5)
        assert found == pytest.approx(2 * ((1000 if streamed else 2000) + tokens + 0.5) / 1e3)


def test_a_run_compares_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run = planned()
    offload: Any = SimpleNamespace(history=history(([1, 1], [0, 0]), ([1, 1], [0, 0])))
    found = {"hit_rate": 0.5, "predicted_ms": 1.25, "measured_ms": 2.5, "ratio": 2.0, "rest_ms": 0.0, "prefill": None,
             "choices": {"slots": 9, "max_swaps": 1, "stream_tokens": 0}, "costs": {"base": 1.5}}  # fmt: skip
    assert run.end(offload, [0.1, 0.2]) == found
    said = "planner: 1.250 ms per token predicted at hit rate 0.500, 2.500 measured (medians of 2 steps): 2.00 of it\n"
    assert capsys.readouterr().out == said
    offload.history = history(long=["long"])
    assert run.end(offload, []) is None
    assert capsys.readouterr().out == (
        "planner: a layer of a prefill: 1.000 ms predicted if streamed, 2.000 if computed by both, 3.000 measured "
        "(medians of 4 layers with 5 tokens, 6 streamed)\n"
    )


def test_the_division_of_an_arena_in_lines() -> None:
    case = load_case("demo")
    arena: Any = SimpleNamespace(frames=101, frame_bytes=50_000, extent_frames=4, extent_slots=3, slot_bytes=777)
    assert memory_split(case, arena, 20, 60, 66, 75) == [
        "arena: 5.0 MB, 101 frames of 50000 bytes, each a page of 16 tokens or part of 3 slots in 4 frames",
        "experts: 75 with shadows, 777 bytes each; 66 may be resident at once",
        "KV pages: 60 for 4 sequence(s) at their longest, 80 can be had",
        "  no sequence         0 pages,     66 slots:  88% of the experts fit",
        "  half as long       30 pages,     51 slots:  68% of the experts fit",
        "  the longest        60 pages,     30 slots:  40% of the experts fit",
    ]
    tight = memory_split(case, arena, 70, 60, 99, 75)
    assert tight[2] == "KV pages: 60 for 4 sequence(s) at their longest, 30 can be had: not all sequences run at once"
    assert tight[3:] == [
        "  no sequence         0 pages,     75 slots: 100% of the experts fit",
        "  half as long       30 pages,     51 slots:  68% of the experts fit",
        "  the longest        30 pages,     51 slots:  68% of the experts fit",
    ]
    assert memory_split(case, arena, 40, 60, 99, 75)[2].endswith("60 can be had")
