"""One step of the loop with an engine and a scheduler that are made up: what is timed, scored, and told to whom."""

import contextlib
import itertools
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from errors import UserError
from executor.engine import loop as module
from executor.engine import rebalancing
from executor.engine.loop import SHARED_STEPS, Asked, Loop, _last_rows, _scores
from executor.engine.pages import PagePool
from executor.engine.rebalancing import Rebalancing
from executor.engine.request import Event, Request, SamplingParams, TokenLogprob
from executor.engine.scheduler import Limits
from executor.engine.timings import Timings
from executor.parallel import join as joining
from executor.parallel.partitions import ParallelSizes
from executor.parallel.placement import imbalance, moves, next_placement
from executor.serving.compiling import Compiler


def sequence(id: int, ids: int = 4, cached: int = 0, prompt: int = 4, group: int = 0, **more: Any) -> Any:
    """A sequence with `ids` tokens, of which the next step takes all that are not cached."""
    sampling = SimpleNamespace(logprobs=more.pop("logprobs", None), prompt_logprobs=more.pop("prompt_logprobs", None))
    made = dict(
        id=id, ids=array("q", range(ids)), cached=cached, prompt_len=prompt, group=group, drafted=0, end=ids,
        new_tokens=ids - cached, decoding=ids > prompt, complete=True, logit_rows=1, scored=False, generated=[],
        prompt_logprobs=[], request=SimpleNamespace(sampling=sampling),
    )  # fmt: skip
    return SimpleNamespace(**made | more)


class Engine:
    """Its logits have in each row the row's number."""

    def __init__(self, group: int = 0, ranks: int = 1):
        world = SimpleNamespace(size=ranks, gather_rows=lambda rows, counts: torch.cat([rows, rows + 1]))
        self.parallel = SimpleNamespace(world=world, attn_dp=SimpleNamespace(rank=group))
        self.platform = SimpleNamespace(device=torch.device("cpu"))
        self.seen: list[Any] = []

    @contextlib.contextmanager
    def step(self, decode: bool) -> Iterator[None]:
        self.seen.append(decode)
        yield

    def pack(self, scheduler: Any, sequences: Any, decode: bool) -> Any:
        return sequences, decode

    def forward(self, batch: Any, decode: bool) -> torch.Tensor:
        rows = sum(s.logit_rows + s.drafted for s in batch[0])
        return torch.arange(float(rows))[:, None].expand(rows, 3)

    def choose(self, logits: torch.Tensor, groups: Any) -> list[int]:
        self.seen.append((logits[:, 0].tolist(), groups))
        return [7] * len(logits)

    def logprobs(self, logits: torch.Tensor, tokens: list[int], counts: Any, most: int) -> list[list[float]]:
        self.seen.append((tokens, counts, most))
        return [[float(row[0]), *([1.0] * most), *([-1.0] * most)] for row in logits]


def loop_of(group: int = 0, ranks: int = 1, groups: int = 1, drafts: Any = None) -> Any:
    made: Any = Loop.__new__(Loop)
    made.engine, made.timings, made._group = Engine(group, ranks), Timings(), group
    made._aborted, made._admitted, made._steps = [], {}, []
    made.scheduler = SimpleNamespace(
        drafts=drafts, pools=[None] * groups, by_group=lambda found: [found],
        commit=lambda step, tokens: [Event(s.id, (7,) * (1 + s.drafted), "") for s in step.finished_prompts],
    )  # fmt: skip
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each look at it takes a second."""
    now = iter(float(second) for second in range(100, 200))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(now)))


def step_of(*sequences: Any, decode: bool) -> Any:
    return SimpleNamespace(sequences=[*sequences], decode=decode, finished_prompts=[s for s in sequences if s.complete])


def test_nothing_to_do_returns_what_was_aborted() -> None:
    loop, gone = loop_of(), Event(1, (), "abort")
    loop._aborted = [gone]
    assert loop.run(None) == [gone]
    assert loop._aborted == []
    assert loop.engine.seen == []


def test_a_decode_step_counts_drafts_and_teaches_their_cost(clock: None) -> None:
    taught: list[tuple[int, float]] = []
    loop = loop_of(drafts=SimpleNamespace(took=lambda rows, seconds: taught.append((rows, seconds))))
    gone = Event(9, (), "abort")
    loop._aborted = [gone]
    one, two = sequence(1, 5, 4, decoding=True, drafted=2), sequence(2, 6, 5, decoding=True)
    events = loop.run(step_of(one, two, decode=True))
    assert events == [gone, Event(1, (7, 7, 7), ""), Event(2, (7,), "")]
    timings = loop.timings
    assert (timings.decode_tokens, timings.drafted_tokens, timings.accepted_tokens) == (4, 2, 2)
    assert (timings.prefill_tokens, timings.first_token) == (0, [])
    assert timings.pure_decode_steps == [1.0]
    assert taught == [(4, 1.0)]


def test_a_step_with_prompts_counts_both_and_times_first_tokens(clock: None) -> None:
    loop = loop_of(drafts=SimpleNamespace())
    fresh, part, going = sequence(1), sequence(2, complete=False, end=3), sequence(3, 6, 5)
    resumed = sequence(4, 6, 2, decoding=False)
    loop._admitted[4] = 40.0
    events = loop.run(step_of(fresh, part, going, resumed, decode=False))
    assert [event.id for event in events] == [1, 3, 4]
    timings = loop.timings
    assert timings.prefill_tokens == 4 + 4 + 4
    assert timings.decode_tokens == 1
    assert timings.pure_decode_steps == []
    assert timings.first_token == [1.0, 61.0]
    assert loop._admitted == {2: 100.0}  # it was admitted in this step
    assert loop.engine.seen[:1] == [False]
    assert loop.engine.seen[1] == ([0.0, 2.0, 3.0], [[fresh, going, resumed]])  # the rows of complete ones


def test_nothing_is_chosen_where_no_prompt_is_whole(clock: None) -> None:
    loop = loop_of()
    assert loop.run(step_of(sequence(1, complete=False), decode=False)) == []
    assert loop.engine.seen == [False]


def test_log_probabilities_are_those_of_the_own_rows(clock: None) -> None:
    """Of three sequences two want them; one has drafts."""
    loop = loop_of()
    loop.engine.forward = lambda batch, decode: torch.arange(5.0)[:, None].expand(5, 3)
    made = [sequence(1, 5, 4, decoding=True), sequence(2, 7, 4, decoding=True, drafted=2, logprobs=2)]
    made.append(sequence(3, 5, 4, decoding=True, logprobs=0))
    events = loop.run(step_of(*made, decode=True))
    assert loop.engine.seen[-1] == ([7, 7, 7, 7], (4,), 2)
    assert events[0].logprobs == ()
    assert [found.logprob for found in events[1].logprobs] == [1.0, 2.0, 3.0]
    assert events[1].logprobs[0] == TokenLogprob(1.0, ((1, -1.0), (1, -1.0)))
    assert events[2].logprobs == (TokenLogprob(4.0, ()),)


def test_rows_of_other_groups_are_not_here() -> None:
    loop = loop_of(group=1, groups=2)
    made = [sequence(1, group=0), sequence(2, group=1), sequence(3, group=1)]
    assert loop._first_rows(made, [4, 2, 3]) == [0, 0, 2]
    asked = [Asked(made[0], 0, [5, 6], 1), Asked(made[2], 2, [7, 8, 9], 3)]
    loop.engine.logprobs = lambda logits, tokens, counts, most: [
        [float(logits[0, 0]), *range(6)] for _ in range(5) if loop.engine.seen.append((tokens, counts, most)) is None
    ]
    found = loop._logprobs(torch.arange(9.0)[:, None], asked)
    assert loop.engine.seen[0] == ([7, 8, 9], (2, 3), 3)
    assert [len(one) for one in found] == [2, 3]
    assert loop._logprobs(torch.zeros(1, 1), []) == []


def test_prompts_are_scored_up_to_their_last_token() -> None:
    loop = loop_of()
    loop.engine.logprobs = lambda logits, tokens, counts, most: [[float(row[0])] for row in logits]
    whole = sequence(1, 5, prompt=5, scored=True, logit_rows=5, prompt_logprobs=0)
    plain, later = sequence(2), sequence(3, 9, 3, prompt=9, end=6, scored=True, logit_rows=3, prompt_logprobs=0)
    assert [_scores(s) for s in (whole, later)] == [4, 3]
    last = sequence(4, 9, 6, prompt=9)
    assert _scores(last) == 2
    loop._score(torch.arange(9.0)[:, None], [whole, plain, later])
    assert [found.logprob for found in whole.prompt_logprobs] == [0.0, 1.0, 2.0, 3.0]
    assert [found.logprob for found in later.prompt_logprobs] == [6.0, 7.0, 8.0]
    assert plain.prompt_logprobs == []
    loop._admitted = {1: 5.0}
    whole.generated, later.generated = [1], [1, 2]
    events = [Event(1, (7,), ""), Event(3, (7,), "")]
    loop._first_tokens(events, [whole, later], 8.0)
    assert loop.timings.first_token == [3.0]
    assert events[0].prompt_logprobs == tuple(whole.prompt_logprobs)
    assert events[1].prompt_logprobs == ()


def test_logits_behind_the_last_tokens() -> None:
    logits = torch.arange(8.0)[:, None]
    assert _last_rows(logits, [sequence(1), sequence(2)]) is logits
    made = [sequence(1, logit_rows=3), sequence(2, logit_rows=2, complete=False), sequence(3)]
    assert _last_rows(logits, made)[:, 0].tolist() == [2.0, 5.0]
    assert _last_rows(logits, [sequence(1), sequence(2, complete=False)])[:, 0].tolist() == [0.0]


def test_all_ranks_learn_the_times_of_rank_0() -> None:
    taught: list[tuple[int, float]] = []
    drafts: Any = SimpleNamespace(took=lambda rows, seconds: taught.append((rows, seconds)))
    loop = loop_of(ranks=2)
    for number in range(SHARED_STEPS - 1):
        loop._took(drafts, number, float(number))
    assert taught == []
    loop._took(drafts, 77, 0.5)
    assert taught == [(n, float(n)) for n in range(SHARED_STEPS - 1)] + [(77, 0.5)]
    assert loop._steps == []


class Layer:
    def __init__(self, held: np.ndarray, rank: int, slots: int):
        self.experts, self.held, self.here = len({*held.tolist()}), held, slice(rank * slots, (rank + 1) * slots)
        self.slots = SimpleNamespace(rows=torch.zeros(slots, dtype=torch.int64))
        self.weights = "weights"
        self.placed: list[np.ndarray] = []

    def place(self, held: np.ndarray) -> None:
        self.placed.append(held)
        self.held = held


def test_experts_are_placed_anew_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts are those of all ranks; each layer moves behind a step of its own."""
    held = np.array([0, 1, 2, 3, 4, 5])
    layers = [Layer(held, 1, 3), Layer(held, 1, 3)]
    totals = torch.tensor([[90, 90, 90, 1, 1, 1], [10, 10, 10, 10, 10, 10]])
    summed: list[Any] = []

    def all_reduce(counts: torch.Tensor) -> torch.Tensor:
        summed.append(counts.tolist())
        return totals

    run: Any = Rebalancing.__new__(Rebalancing)
    run.layers = [(layer, layer.slots) for layer in layers]
    run.world = SimpleNamespace(size=2, rank=0, all_reduce=all_reduce)
    run.interval, run.steps, run.due, run.history = 3, 0, [], []
    moved: list[Any] = []
    monkeypatch.setattr(run, "_move", lambda *given: moved.append(given) or 50)
    layers[0].slots.rows += torch.tensor([4, 5, 6])
    for _ in range(2):
        run.end()
    assert summed == []
    run.end()
    assert summed == [[[0, 0, 0, 4, 5, 6], [0] * 6]]
    assert layers[0].slots.rows.tolist() == [0, 0, 0]
    before = (imbalance(totals[0].numpy(), held, 2) + 1) / 2
    assert run.history[0] == rebalancing.Rebalance(3, before, before)
    run.end()
    wanted = next_placement(totals[0].numpy(), 2, held)
    found = moves(held, wanted, 2)
    assert moved == [("weights", found, 3)]
    assert layers[0].placed[0].tolist() == wanted.tolist()
    assert not layers[1].placed
    assert capsys.readouterr().out == ""
    run.end()
    one = run.history[0]
    assert not layers[1].placed  # it is even
    assert (one.experts, one.nbytes) == (len(found), 50)
    assert one.after == pytest.approx((imbalance(totals[0].numpy(), wanted, 2) + 1) / 2)
    assert 0 < one.ms < 1e5
    said = capsys.readouterr().out
    assert said == (
        f"experts placed anew after 3 steps: the busiest rank had {before:.2f} times the mean and has {one.after:.2f} "
        f"times now; {len(found)} experts moved in {one.ms:.0f} ms\n"
    )
    assert run.report() == [vars(one)]
    run.interval = None
    run.end()
    assert run.steps == 5


def test_weights_come_in_the_order_of_ranks() -> None:
    run: Any = Rebalancing.__new__(Rebalancing)
    exchanged: list[Any] = []

    def exchange(rows: Any, sent: list[int], received: list[int]) -> torch.Tensor:
        exchanged.append((rows, sent, received))
        return torch.zeros(sum(received), 5, dtype=torch.uint8)

    restored: list[Any] = []
    weights: Any = SimpleNamespace(
        stored=lambda slots: ("stored", slots), restore=lambda slots, rows: restored.append((slots, len(rows)))
    )
    run.world = SimpleNamespace(rank=1, size=3, exchange_rows=exchange)
    found = [(8, 4), (0, 3), (5, 7), (4, 1), (1, 5)]  # slots 3, 4 and 5 are here
    assert run._move(weights, found, 3) == 15
    assert exchanged == [(("stored", [2, 1]), [1, 0, 1], [2, 0, 1])]
    assert restored == [([0, 2, 1], 3)]
    assert run._move(weights, [(0, 8)], 3) == 0
    assert len(restored) == 1


def test_a_compiler_ends_its_process() -> None:
    compiler: Any = Compiler.__new__(Compiler)
    done: list[str] = []
    compiler.helper = SimpleNamespace(close=lambda: done.append("closed"))
    compiler.close()
    assert done == ["closed"]


def test_groups_of_the_same_ranks_are_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    dist = SimpleNamespace(
        init_process_group=lambda backend, timeout: made.append((backend, timeout.total_seconds())),
        new_group=lambda ids, pg_options: made.append((ids, pg_options)) or f"handle{ids}",
    )
    monkeypatch.setattr(joining, "dist", dist)
    found = joining.join(ParallelSizes(4, 2, 4, 2, 4, 3), 2, 77, "gloo", lambda name: f"of {name}")
    assert made == [
        ("gloo", 77.0), ([0, 1, 2, 3], "of world"), ([0, 1], "of attn_tp"), ([2, 3], "of attn_tp"),
        ([0, 2], "of attn_dp"), ([1, 3], "of attn_dp"),
    ]  # fmt: skip
    places = {name: getattr(found, name) for name in ("world", "attn_tp", "attn_dp", "embed_tp", "lmhead_tp")}
    assert {name: (group.rank, group.size, group.handle) for name, group in places.items()} == {
        "world": (2, 4, "handle[0, 1, 2, 3]"), "attn_tp": (0, 2, "handle[2, 3]"), "attn_dp": (1, 2, "handle[0, 2]"),
        "embed_tp": (0, 2, "handle[2, 3]"), "lmhead_tp": (2, 4, "handle[0, 1, 2, 3]"),
    }  # fmt: skip
    assert (found.moe_tp.rank, found.moe_tp.size, found.moe_ep.rank, found.moe_ep.size) == (2, 4, 0, 1)
    assert found.expert_slots == 3
    del made[:]
    assert joining.join(ParallelSizes(1), 0, 77, "gloo", lambda name: None).world.size == 1
    assert made == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_layer_is_placed_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """Rank 0 says what came of it."""
    held = np.array([0, 1, 2, 3, 4, 5])
    layer, totals = Layer(held, 1, 3), torch.tensor([[90, 90, 90, 1, 1, 1]])
    run: Any = Rebalancing.__new__(Rebalancing)
    run.layers = [(layer, layer.slots)]
    run.world = SimpleNamespace(size=2, rank=rank, all_reduce=lambda counts: totals)
    run.interval, run.steps, run.due, run.history = 1, 0, [], []
    monkeypatch.setattr(run, "_move", lambda *given: 50)
    now = iter([10.0, 10.25])
    monkeypatch.setattr(rebalancing, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    run.end()
    run.end()
    [one] = run.history
    assert one.ms == 250.0
    assert one.after == pytest.approx(imbalance(totals[0].numpy(), layer.held, 2))
    assert bool(capsys.readouterr().out) == (rank == 0)
    run.end()
    assert [found.steps for found in run.history] == [1, 3]


def test_only_layers_with_slots_are_placed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts:
        def __init__(self, slots: object):
            self.slots = slots

    placed, fixed, other = Experts("slots"), Experts(None), SimpleNamespace(slots="slots")
    monkeypatch.setattr(rebalancing, "Experts", Experts)
    monkeypatch.setattr(rebalancing, "layers_of", lambda model: [("a", placed), ("b", fixed), ("c", other)])
    given: Any = "model", "world", 7
    run: Any = Rebalancing(*given)
    assert (run.layers, run.world, run.interval) == ([(placed, "slots")], "world", 7)
    assert (run.steps, run.due, run.history) == (0, [], [])
    one = rebalancing.Rebalance(1, 2.0, 2.0)
    assert (one.experts, one.nbytes, one.ms) == (0, 0, 0.0)


def waiting(loop: Any) -> list[Any]:
    """Gives the loop a scheduler that only takes sequences; -> those."""
    taken: list[Any] = []
    loop.engine.config = SimpleNamespace(vocab_size=96)
    loop.engine.grammars = SimpleNamespace(matcher=lambda grammar: f"matcher of {grammar}")
    loop.scheduler.add = taken.append
    return taken


def test_requests_are_numbered_and_queued() -> None:
    loop = loop_of()
    loop._ids = itertools.count()
    taken = waiting(loop)
    assert [loop.submit(Request((0, 95))), loop.submit(Request((1,)))] == [0, 1]
    assert [(one.id, one.ids.tolist(), one.matcher) for one in taken] == [(0, [0, 95], None), (1, [1], None)]
    follows: Any = "grammar"
    loop.submit(Request((2,), SamplingParams(grammar=follows)))
    assert taken[2].matcher == "matcher of grammar"


@pytest.mark.parametrize(
    ("ids", "bias", "said"),
    [((5, 96, 97), {}, "prompt 0: token 96 is outside the vocabulary of 96"),
     ((-1, 5), {}, "prompt 0: token -1 is outside the vocabulary of 96"),
     ((5,), {95: 1.0, 96: 1.0}, "logit_bias: token 96 is outside the vocabulary of 96")],
)  # fmt: skip
def test_tokens_outside_the_vocabulary_are_refused(ids: tuple[int, ...], bias: dict[int, float], said: str) -> None:
    loop = loop_of()
    loop._ids = itertools.count()
    taken = waiting(loop)
    with pytest.raises(UserError, match=f"^{said}$"):
        loop.submit(Request(ids, SamplingParams(logit_bias=bias)))
    assert taken == []
    loop.submit(Request((5,), SamplingParams(logit_bias={0: 1.0, 95: 1.0})))
    assert len(taken) == 1


def test_an_end_is_told_by_the_next_step() -> None:
    loop, gone = loop_of(), Event(4, (), "abort")
    loop.scheduler.idle, loop.scheduler.schedule = True, lambda: None
    loop.scheduler.abort = lambda id: gone if id == 4 else None
    loop._admitted = {4: 1.0, 5: 2.0}
    assert loop.idle
    loop.abort(5)
    assert loop.idle
    assert loop._admitted == {4: 1.0, 5: 2.0}
    loop.abort(4)
    assert not loop.idle
    assert loop._admitted == {5: 2.0}
    assert loop.step() == [gone]
    assert loop.idle
    loop.scheduler.idle = False
    assert not loop.idle


@pytest.mark.parametrize("serving", [False, True])
def test_a_loop_schedules_by_the_limits_of_its_case(monkeypatch: pytest.MonkeyPatch, serving: bool) -> None:
    asked: list[Any] = []

    def limits(case: Any, serving: bool) -> Limits:
        asked.append((case, serving))
        return Limits(4, 20, 5, 2)

    monkeypatch.setattr(module, "limits_of", limits)
    pool = PagePool(9, 5)
    engine: Any = SimpleNamespace(case="case", pages=pool, parallel=SimpleNamespace(attn_dp=SimpleNamespace(rank=1)))
    loop: Any = Loop(engine, frozenset({7}), serving) if serving else Loop(engine, frozenset({7}))
    assert asked == [("case", serving)]
    assert (loop.scheduler.stop_ids, loop.stop_ids, loop._group) == ({7}, {7}, 1)
    assert loop.scheduler.pools[1] is pool
    assert (loop._aborted, loop._steps, loop._admitted, next(loop._ids)) == ([], [], {}, 0)
    assert loop.idle
