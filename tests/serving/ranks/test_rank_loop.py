"""What a rank keeps and tells between steps, with an engine, a scheduler and times that are made up."""

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.engine.request import Event, Grammar, SamplingParams
from executor.engine.request import TokenLogprob as EngineLogprob
from executor.engine.timings import Timings
from serving.ranks import messages, worker
from serving.ranks.messages import (
    Abort,
    Fatal,
    Group,
    Out,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Residency,
    Row,
    Running,
    Sampling,
    State,
    Stop,
    Submit,
    Tick,
    TokenLogprob,
    TopToken,
    Watch,
)
from serving.ranks.worker import Worker
from tests.serving.clock import Clock
from tests.serving.ranks.scripted import Script
from umbra.errors import UserError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, worker)


class Channel(Script):
    def __init__(self, *given: Any):
        super().__init__()
        self.messages, self.waits = [*given], list[float]()

    def receive(self, wait_s: float) -> list[Any]:
        self.waits.append(wait_s)
        return super().receive(wait_s)


class Scheduler:
    """Takes what it is given; its steps are those of `steps`."""

    def __init__(self) -> None:
        self.mixed_tokens = self.expert_pages = -1
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.preempted: list[Any] = []
        self.steps: list[Any] = []
        self.pools = [SimpleNamespace(pages=50)]
        self.caches = [SimpleNamespace(held=10, idle=range(30)), SimpleNamespace(held=7, idle=range(4))]
        self.limits = SimpleNamespace(max_sequence_length=500, page_size=4, batch_size=3, groups=2)

    def schedule(self) -> Any:
        return self.steps.pop(0) if self.steps else None

    def digest(self, step: Any) -> int:
        return 77 if step is None else 78

    def committed(self, group: int) -> int:
        return [12, 10][group]


class Loop:
    def __init__(self) -> None:
        self.scheduler, self.timings = Scheduler(), Timings()
        self.idle = False
        self.added: list[Any] = []
        self.aborted: list[int] = []
        self.events: list[Event] = []
        self.does: Any = lambda: None

    def submit(self, request: Any, id: int) -> Any:
        if id == 13:
            raise UserError("prompt: too long")
        self.added.append(SimpleNamespace(id=id, request=request, decoding=True, cached=0))

    def abort(self, id: int) -> None:
        self.aborted.append(id)

    def run(self, step: Any) -> list[Event]:
        self.does()
        return self.events


class Learner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.learned: list[Any] = []
        self.value = 0.0

    def learn(self, *of: Any) -> None:
        self.learned.append(of)

    def chunk(self, *of: Any) -> int:
        self.learned.append(of)
        return 48


def settings(prefill_pause_ms: int = 250) -> Any:
    return SimpleNamespace(
        serve_config=SimpleNamespace(prefill_pause_ms=prefill_pause_ms),
        data_config=SimpleNamespace(chunked_prefill_size=64),
        cache_config=SimpleNamespace(page_size=4),
    )


def made(channel: Channel | None = None, **more: Any) -> Any:
    """A worker whose parts are known."""
    found: Any = Worker.__new__(Worker)
    found.loop, found.channel, found.case = Loop(), channel, settings()
    found.pace, found.prefill_rate = Learner(), Learner()
    found.control = SimpleNamespace(alone=True)
    found.runner = SimpleNamespace(
        ranks=SimpleNamespace(rank=1), config=SimpleNamespace(vocab_size=96), results=Path("/r"), planned=None
    )
    found.shares = found.experts = found.news = None
    found.stop_ids = frozenset({9, 3})
    found.steps = found.preemptions = found.drafted = found.accepted = found._generated = 0
    found.stopping = found.watched = False
    found._reported = found._shown = 0.0
    found._since = (999.0, 0)
    found._step_tokens, found._arrived, found._queued_s = [], {}, {}
    for name, value in more.items():
        setattr(found, name, value)
    return found


def submitted(id: int = 1, **sampling: Any) -> Submit:
    return Submit(id, [1, 2], Sampling(5, **sampling), 3, b"s")


def test_a_tick_has_what_the_front_has_sent() -> None:
    channel = Channel(submitted(), Ping(7), Abort(4), Watch(True), None, Stop())
    rank = made(channel, steps=6)
    reported: list[Any] = []
    rank.report = reported.append
    assert rank.next_tick(channel) == Tick(6, 0, 48, 0, [submitted(), Abort(4), Stop(), Stop()])
    assert channel.sent == [Pong(7, 6)]
    assert rank.watched is True
    assert reported == [channel]
    assert channel.waits == [0]  # there is something to do
    rank.loop.idle = True
    channel.messages = [Watch(False)]
    assert rank.next_tick(channel).events == []
    assert (channel.waits, rank.watched) == ([0, worker.IDLE_S], False)
    channel.messages = [OSError("lost")]
    with pytest.raises(OSError, match="lost"):
        rank.next_tick(channel)


def test_the_share_of_experts_is_decided_by_what_a_page_takes() -> None:
    decided: list[float] = []
    channel = Channel()
    rank = made(channel, shares=SimpleNamespace(expert_pages=12, decide=decided.append), report=lambda channel: None)
    assert rank.next_tick(channel).expert_pages == 12
    assert decided == []  # nothing is known of prompts
    rank.prefill_rate.value = 8.0
    rank.next_tick(channel)
    assert decided == [0.5]


def test_prompt_tokens_of_a_step_take_as_long_as_the_case_says() -> None:
    rank = made()
    rank.loop.scheduler.running = ["a"]
    assert rank.mixed_tokens() == 48
    assert rank.pace.learned == [(["a"], 4, 0.25, 64)]


@pytest.mark.parametrize("alone", [False, True])
def test_rank_0_shares_its_tick_with_the_digest_of_its_step(alone: bool) -> None:
    shared: list[Any] = []
    step = SimpleNamespace(sequences=[])
    rank = made(Channel(), control=SimpleNamespace(alone=alone, share=shared.append))
    rank.loop.scheduler.steps = [step]
    ran: list[Any] = []
    tick = Tick(0, 0, 5, 6, [])
    rank.next_tick, rank.step, rank.forget = lambda channel: tick, ran.append, lambda: ran.append("forgotten")
    rank.turn()
    assert shared == ([] if alone else [Tick(0, 78, 5, 6, [])])
    assert ran == [step, "forgotten"]
    assert (rank.loop.scheduler.mixed_tokens, rank.loop.scheduler.expert_pages) == (5, 6)
    rank.steps = 63
    rank.turn()
    assert ran == [step, "forgotten", None]
    rank.steps = 64
    rank.turn()
    assert ran[3:] == [None, "forgotten"]


def test_other_ranks_do_what_rank_0_does_or_end() -> None:
    def rank_of(tick: Tick) -> Any:
        def share(own: Any) -> Tick:
            assert own is None
            return tick

        found = made(None, control=SimpleNamespace(alone=False, share=share), steps=5)
        found.ran = []
        found.step = found.ran.append
        return found

    good = rank_of(Tick(5, 77, 8, 9, [Abort(4)]))
    good.turn()
    assert (good.ran, good.loop.aborted) == ([None], [4])
    assert (good.loop.scheduler.mixed_tokens, good.loop.scheduler.expert_pages) == (8, 9)
    for tick in (Tick(5, 78, 8, 9, []), Tick(4, 77, 8, 9, [])):
        other = rank_of(tick)
        with pytest.raises(RuntimeError) as raised:
            other.turn()
        assert other.ran == []
        assert str(raised.value) == (
            f"rank 1 differs from rank 0 at step {tick.number}: its step 5 has the digest 000000000000004d, "
            f"rank 0's {tick.digest:016x}"
        )


@pytest.mark.parametrize("told", [False, True])
def test_what_has_come_is_taken_on_every_rank_alike(clock: Clock, told: bool) -> None:
    channel = Channel() if told else None
    rank = made(channel)
    bad = submitted(2, temperature=-1.0)
    rank.apply(Tick(0, 0, None, 0, [submitted(1), submitted(13), Abort(4), bad]))
    assert [sequence.id for sequence in rank.loop.added] == [1]
    assert (rank.loop.aborted, rank.stopping) == ([4], False)
    assert rank.loop.scheduler.mixed_tokens is None
    assert rank._arrived == ({1: 1000.0} if told else {})
    if channel:
        first, second = channel.sent
        assert first == Refused(13, "prompt: too long")
        assert (second.id, second.reason.startswith("temperature: ")) == (2, True)
    rank.apply(Tick(1, 0, 7, 0, [Stop()]))
    assert rank.stopping is True


class Totals:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.collected = 0

    def prefilled(self, tokens: int) -> None:
        self.tokens.append(tokens)

    def collect(self) -> None:
        self.collected += 1


def event(id: int, tokens: Sequence[int], finish: str = "", **more: Any) -> Any:
    return Event(id, tuple(tokens), finish_reason=finish, **more)


def test_what_a_step_did_is_counted(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    rank = made(Channel(), experts=Totals(), steps=4, preemptions=1, drafted=2, accepted=1, _generated=10)
    timings = rank.loop.timings
    timings.prefill_tokens, timings.decode_tokens, timings.drafted_tokens, timings.accepted_tokens = 100, 200, 30, 20
    told: list[Any] = []
    rank.tell = lambda *of: told.append(of)

    def step() -> None:
        clock.now += 2.0
        timings.prefill_tokens, timings.decode_tokens = 107, 203
        timings.drafted_tokens, timings.accepted_tokens = 35, 22
        rank.loop.scheduler.preempted = [SimpleNamespace(id=8, ids=[1, 2, 3]), SimpleNamespace(id=9, ids=[1])]

    rank.loop.does, rank.loop.events = step, [event(1, [5, 6]), event(2, [7])]
    prompt = SimpleNamespace(decoding=False, new_tokens=7, cached=2)
    rank.step(SimpleNamespace(sequences=[prompt]))
    assert (rank.steps, rank.preemptions, rank.drafted, rank.accepted, rank._generated) == (5, 3, 7, 3, 13)
    ((amounts, seconds),) = rank.pace.learned
    assert (amounts.tolist(), seconds) == ([1.0, 7.0, 7 * (2 + 3.5)], 2.0)
    assert rank.prefill_rate.learned == [(7, 2.0)]
    assert rank.experts.tokens == [7]
    assert rank._step_tokens == [10]
    assert told == [(rank.channel, rank.loop.events, 1000.0)]
    again = "is preempted for want of memory: {} tokens are computed again later"
    assert capsys.readouterr().out.splitlines() == [f"request 8 {again.format(3)}", f"request 9 {again.format(1)}"]


def test_a_step_without_prompts_says_nothing_of_them(clock: Clock) -> None:
    rank = made(None)
    timings = rank.loop.timings

    def step() -> None:
        timings.decode_tokens += 3

    rank.loop.does = step
    rank.step(SimpleNamespace(sequences=[SimpleNamespace(decoding=True)]))
    assert (rank.pace.learned, rank._step_tokens) == ([], [3])
    rank.loop.does = lambda: None
    rank.step(None)
    assert (rank.steps, rank._step_tokens, rank.prefill_rate.learned) == (2, [3], [(0, 0.0), (0, 0.0)])

    def both() -> None:
        timings.prefill_tokens += 3
        timings.decode_tokens += 3

    rank.loop.does = both
    rank.step(SimpleNamespace(sequences=[SimpleNamespace(decoding=False, new_tokens=3, cached=0)]))
    assert rank._step_tokens == [3, 6]


def test_rows_tell_how_long_a_request_has_waited() -> None:
    """From its arrival to the begin of its first step, in its first row; those that are aborted get none."""
    channel = Channel()
    rank = made(channel, steps=6, _arrived={1: 990.0, 2: 995.0, 3: 996.0, 4: 997.0})
    rank.loop.scheduler.running = [SimpleNamespace(id=1), SimpleNamespace(id=2)]
    rank.tell(channel, [event(2, [7]), event(3, [8], "length"), event(5, [], "abort")], 1000.0)
    assert channel.sent == [Out(6, [Row(2, [7], queued_s=5.0), Row(3, [8], "length", queued_s=4.0)])]
    assert (rank._arrived, rank._queued_s) == ({4: 997.0}, {1: 10.0})
    rank.tell(channel, [event(1, [9]), event(2, [7])], 1001.0)
    assert channel.sent[1] == Out(6, [Row(1, [9], queued_s=10.0), Row(2, [7])])
    rank.tell(channel, [event(1, [], "abort")], 1002.0)
    rank.tell(channel, [], 1002.0)
    assert len(channel.sent) == 2


def test_what_is_recorded_is_forgotten() -> None:
    rank = made(experts=Totals(), _step_tokens=[*range(1030)])
    rank.loop.timings.prefill_tokens = 5
    rank.forget()
    assert rank.loop.timings.prefill_tokens == 0
    assert rank.experts.collected == 1
    assert rank._step_tokens == [*range(6, 1030)]
    rank.experts = None
    rank.forget()
    assert len(rank._step_tokens) == 1024


def test_what_the_front_learns_of_a_model_that_is_ready() -> None:
    rank = made()
    rank.prefill_rate.value = 12.5
    assert rank.ready() == Ready(200, 3, 96, 4, 50, 2, [3, 9], 12.5, "/r")
    rank.loop.scheduler.limits.max_sequence_length = 150
    assert rank.ready().longest == 150


def sequence(id: int, **more: Any) -> Any:
    usual = {"prompt_len": 4, "cached": 5, "generated": [1, 2], "longest": 9, "preemptions": 3}
    return SimpleNamespace(id=id, **usual | more)


def test_a_snapshot_of_a_rank(clock: Clock) -> None:
    channel = Channel()
    rank = made(
        channel, steps=8, preemptions=2, drafted=3, accepted=1, _step_tokens=[5, 6], _generated=20, _reported=999.0,
        _since=(999.5, 8),
    )  # fmt: skip
    rank.prefill_rate.value = 12.5
    scheduler = rank.loop.scheduler
    scheduler.running, scheduler.waiting = [sequence(1)], [sequence(id, generated=[]) for id in range(2, 20)]
    rank.loop.timings.prefill_tokens = 5
    rank.report(channel)
    running = Running(1, 4, 5, 2, 9, 3)
    queue = [Running(id, 4, 5, 0, 9, 3) for id in range(2, 18)]
    state = State(
        step=8, waiting=18, running=[running], queue=queue, groups=[Group(10, 2, 30), Group(7, 3, 4)], preemptions=2,
        drafted=3, accepted=1, step_tokens=[5, 6], prefill_rate=12.5, decode_rate=24.0, arena_frames=50, free_frames=10,
    )  # fmt: skip
    assert channel.sent == [state]
    assert (rank._reported, rank._since, rank._step_tokens) == (1000.0, (1000.0, 20), [])
    assert rank.loop.timings.prefill_tokens == 0
    clock.now = 1000.2
    rank.report(channel)
    assert len(channel.sent) == 1
    clock.now = 1000.25
    channel.behind = True
    rank.report(channel)
    assert len(channel.sent) == 1
    channel.behind = False
    rank.report(channel)
    assert len(channel.sent) == 2
    assert channel.sent[1].decode_rate == 0.0


def test_residency_is_told_once_a_second_to_those_who_watch(clock: Clock) -> None:
    residency = Residency(1, 1, b"a", b"b")
    changes: list[Any] = [residency, residency, None, residency]

    def fields() -> dict[str, int]:
        return {"experts": 6, "arena_frames": 70, "free_frames": 5}

    channel = Channel()
    rank = made(channel, news=SimpleNamespace(fields=fields, changed=lambda: changes.pop(0)), _shown=999.5)
    for now, watched, told in (
        (1000.0, False, False), (1000.25, True, False), (1000.5, True, True), (1001.25, True, False),
        (1001.5, True, True), (1002.5, True, False), (1002.75, True, True),
    ):  # fmt: skip
        clock.now, rank.watched = now, watched
        channel.sent.clear()
        rank.report(channel)
        *before, state = channel.sent
        assert before == [residency] * told, now
        assert (state.experts, state.arena_frames, state.free_frames) == (6, 70, 5)
    assert changes == []
    assert rank._shown == 1002.75


def test_requests_of_the_front_are_the_engine_s() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "logit_bias": {1: 2.0}, "stop_token_ids": (7,)}
    found = worker.request_of(submitted(8, grammar=messages.Grammar("regex", "a"), logprobs=2, **given))
    wanted = SamplingParams(max_tokens=5, grammar=Grammar("regex", "a"), logprobs=2, **given)
    assert (found.ids, found.sampling) == ((1, 2), wanted)
    assert (found.priority, found.salt) == (3, b"s")
    assert worker.request_of(submitted(8)).sampling == SamplingParams(max_tokens=5)
    with pytest.raises(UserError, match="temperature"):
        worker.request_of(submitted(8, temperature=-1.0))


def test_rows_of_events() -> None:
    found = [EngineLogprob(-1.0, ((5, -1.0), (6, -2.0)))]
    prompt = [EngineLogprob(-3.0, ())]
    row = worker.row_of(event(1, [5], "stop", found=4, logprobs=tuple(found), prompt_logprobs=tuple(prompt)), 0.5)
    logprobs = [TokenLogprob(-1.0, [TopToken(5, -1.0), TopToken(6, -2.0)])]
    assert row == Row(1, [5], "stop", 4, logprobs, [TokenLogprob(-3.0, [])], 0.5)
    assert worker.row_of(event(1, [5])) == Row(1, [5])
    assert worker.row_of(event(1, [5])).queued_s == 0.0


def test_a_rank_serves_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(
        worker, "gc", SimpleNamespace(collect=lambda: done.append("collect"), freeze=lambda: done.append("freeze"))
    )
    for channel in (Channel(), None):
        done.clear()
        rank = made(channel, engine=SimpleNamespace(platform=SimpleNamespace(watched=nullcontext)))
        rank.warm_up = lambda: done.append("warm up")

        def turn(rank: Any = rank) -> None:
            done.append("turn")
            rank.stopping = done.count("turn") == 2

        rank.turn = turn
        rank.run()
        assert done == ["warm up", "collect", "freeze", "turn", "turn"]
        if channel:
            assert channel.sent == [rank.ready()]


class Served:
    """A worker in the place of a real one."""

    error: BaseException | None = None
    made: list[Any]

    def __init__(self, runner: Any, channel: Any):
        self.made.append((runner, channel))

    def run(self) -> None:
        if self.error:
            raise self.error


class Ending(Channel):
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, None), (UserError("the cup is empty"), "the cup is empty"),
        (ConnectionError("rank 1 left"), "rank 1 left"),
        (ValueError("odd"), "ValueError: odd"), (MemoryError(), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_the_front_is_told_why_a_rank_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, told: str | None, rank: int
) -> None:
    channel, calls = Ending(), list[Any]()
    runner = SimpleNamespace(setup=lambda: calls.append("setup"))
    Served.error, Served.made = error, []
    monkeypatch.setattr(worker, "Worker", Served)
    monkeypatch.setattr(worker, "open_channel", lambda: channel)
    monkeypatch.setattr(worker, "load_case", lambda name, overrides: (name, overrides))

    def make_runner(*of: Any) -> Any:
        calls.append(of)
        return runner

    monkeypatch.setattr(worker, "make_runner", make_runner)
    monkeypatch.setattr(
        "serving.ranks.worker.faulthandler.register", lambda *of, **more: calls.append((*of, more["all_threads"]))
    )
    monkeypatch.setattr("serving.ranks.worker.signal.signal", lambda *of: calls.append(of))
    ranks: Any = SimpleNamespace(rank=rank)

    def serve() -> None:
        worker.serve(tmp_path, ranks, "case", ["a=1"])

    if error:
        with pytest.raises(type(error)):
            serve()
    else:
        serve()
    assert calls == [
        (signal.SIGUSR1, True), (signal.SIGINT, signal.SIG_IGN), (("case", ["a=1"]), tmp_path, ranks), "setup",
    ]  # fmt: skip
    assert (tmp_path / f"stacks{rank}.log").exists()
    assert Served.made == [(runner, None if rank else channel)]
    assert channel.closed == (rank == 0)
    if rank:
        assert channel.sent == []
        return
    assert channel.sent[0] == Progress("loading weights", 0.0)
    fatal = [message.reason for message in channel.sent[1:] if isinstance(message, Fatal)]
    assert len(fatal) == len(channel.sent) - 1 == (error is not None)
    assert told is None or fatal == [told]


def test_ranks_are_started_by_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def channel(path: Path) -> str:
        made.append(path)
        return "channel"

    monkeypatch.setattr(worker, "Channel", channel)
    monkeypatch.setattr("serving.ranks.worker.env.serve_socket", lambda: None)
    with pytest.raises(UserError, match="UMBRA_SERVE_SOCKET is not set"):
        worker.open_channel()
    monkeypatch.setattr("serving.ranks.worker.env.serve_socket", lambda: Path("/socket"))
    assert str(worker.open_channel()) == "channel"
    assert made == [Path("/socket")]


def test_the_program_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(worker, "load_case", lambda name, overrides: (name, overrides))
    monkeypatch.setattr(worker, "run_rank", lambda case, results, body: ran.append((case, results, body)))
    monkeypatch.setattr(worker, "serve", lambda *of: ran.append(of))
    monkeypatch.setattr("serving.ranks.worker.env.case_name", lambda: "")
    with pytest.raises(UserError, match="CASE_NAME is not set"):
        worker.main([])
    monkeypatch.setattr("serving.ranks.worker.env.case_name", lambda: "demo")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    worker.main(["--set", "a=1", "b=2", "--set", "c=3", "--results", "/r"])
    ((case, results, body),) = ran
    assert (case, results) == (("demo", ["a=1", "b=2", "c=3"]), Path("/r"))
    assert os.environ["TQDM_DISABLE"] == "1"
    body("results", "ranks")
    assert ran[1] == ("results", "ranks", "demo", ["a=1", "b=2", "c=3"])


class Warming(Loop):
    """Prefills each sequence in one step, of a second for every 64 tokens, and then all decode together."""

    def __init__(self, clock: Clock, drafts: Any = None):
        super().__init__()
        self.clock, self.open, self.log = clock, list[Any](), list[Any]()
        self.scheduler.drafts = drafts  # type: ignore[attr-defined]
        self.scheduler.caches = [SimpleNamespace(trim=lambda pages: self.log.append(("trim", pages)))]
        self.scheduler.limits.draft_tokens = 3
        self.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self.ran: list[int] = []  # sequences that decode in a step

    @property
    def idle(self) -> bool:
        return not self.open

    @idle.setter
    def idle(self, value: bool) -> None: ...

    def submit(self, request: Any, id: int) -> Any:
        super().submit(request, id)
        sequence = self.added[-1]
        sequence.arrival, sequence.new_tokens, sequence.made = len(self.added) - 1, len(request.ids), 0
        self.open.append(sequence)

    def schedule(self) -> Any:
        waiting = [s for s in self.open if not s.made]
        assert self.open
        return SimpleNamespace(sequences=waiting[:1] or [*self.open], decode=not waiting)

    def run(self, step: Any) -> list[Event]:
        for s in step.sequences:
            self.clock.now += s.new_tokens / 640
            s.made += 1
        self.open = [s for s in self.open if s.made < s.request.sampling.max_tokens]
        if step.decode:
            self.ran.append(len(step.sequences))
            self.log.append((len(step.sequences), self.scheduler.drafts is not None))  # type: ignore[attr-defined]
        return []

    def abort(self, id: int) -> None:
        super().abort(id)
        self.open = [s for s in self.open if s.id != id]


def warmed(clock: Clock, monkeypatch: pytest.MonkeyPatch, drafts: Any = None, channel: Any = None, **more: Any) -> Any:
    rank = made(channel, loop=Warming(clock, drafts), **more)
    rank.case.decode_rows = 64
    rank.control = SimpleNamespace(number=lambda own: rank.lengths.append(own) or own)
    rank.lengths = []
    rank.steps = rank.preemptions = rank.drafted = rank.accepted = rank._generated = 5
    rank._step_tokens = [1]
    rank.warm_up()
    return rank


def test_a_warm_up_prefills_longer_prompts_until_they_take_long(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one comes twice; then steps of every number of sequences decode, down to one."""
    channel = Channel()
    monkeypatch.setattr(worker, "first_prompt", lambda page, longest: (page, longest) == (4, 500) and 64)
    asked: list[Any] = []

    def following(*of: Any) -> int:
        asked.append(of)
        return 0 if len(asked) == 2 else 2 * int(of[0])

    monkeypatch.setattr(worker, "next_prompt", following)
    rank = warmed(clock, monkeypatch, channel=channel)
    added = rank.loop.added
    assert [len(s.request.ids) for s in added] == [64, 64, 128, 1, 1, 1]
    assert [s.id for s in added] == [-1, -2, -3, -4, -5, -6]
    assert [s.request.sampling.max_tokens for s in added] == [1, 1, 1, 5, 5, 5]
    assert all(s.request.sampling.ignore_eos for s in added)
    assert [s.request.ids[:2] for s in added[:2]] == [(7919 % 96, 7920 % 96), (2 * 7919 % 96, (2 * 7919 + 1) % 96)]
    assert [(length, round(seconds, 6), *rest) for length, seconds, *rest in asked] == [
        (64, 0.1, 4, 50, 500), (128, 0.2, 4, 50, 500),
    ]  # fmt: skip
    assert rank.lengths == [128, 0]
    assert rank.loop.ran == [3, 2, 1]
    assert rank.loop.aborted == [-4, -5, -6]  # the one that came first
    assert channel.sent == [Progress("warming up", share) for share in (1 / 3, 2 / 3, 1.0)]
    assert rank.loop.log[-1] == ("trim", 0)
    zeros = rank.steps, rank.preemptions, rank.drafted, rank.accepted, rank._generated
    assert (zeros, rank._step_tokens) == ((0,) * 5, [])
    assert rank.prefill_rate.value == 0.0


def test_an_answer_of_the_warm_up_is_no_longer_than_a_sequence(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "first_prompt", lambda page, longest: 499)
    monkeypatch.setattr(worker, "next_prompt", lambda *of: 0)
    rank = made(None, loop=Warming(clock))
    rank.loop.scheduler.limits.max_sequence_length = 4
    monkeypatch.setattr(worker, "first_prompt", lambda page, longest: 3)
    rank.case.decode_rows = 64
    rank.control = SimpleNamespace(number=lambda own: own)
    rank.warm_up()
    assert [s.request.sampling.max_tokens for s in rank.loop.added] == [1, 1, 3, 3, 3]


def test_a_warm_up_with_drafts_runs_steps_of_more_rows(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "first_prompt", lambda page, longest: 1)
    monkeypatch.setattr(worker, "next_prompt", lambda *of: 0)
    monkeypatch.setattr(worker, "SIZES", (1, 3, 4, 32, 64, 96))
    filled: list[int] = []
    drafts = SimpleNamespace(fill=filled.append)
    rank = warmed(clock, monkeypatch, drafts)
    assert filled == [4, 32, 64]
    assert [s.request.sampling.max_tokens for s in rank.loop.added] == [1, 1, *[3 + 2 + 3 * 4] * 3]
    assert rank.loop.log == [(3, False), *[(3, True)] * 3, (2, False), (1, False), ("trim", 0)]
    assert rank.loop.scheduler.drafts is drafts


def test_a_warm_up_says_nothing_of_experts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "first_prompt", lambda page, longest: 1)
    monkeypatch.setattr(worker, "next_prompt", lambda *of: 0)

    class Experts(Totals):
        offload, restarted = "offload", 0

        def restart(self) -> None:
            self.restarted += 1

    begun: list[Any] = []
    planned = SimpleNamespace(begin=lambda *of: begun.append(of))
    for plan in (None, planned):
        runner = SimpleNamespace(config=SimpleNamespace(vocab_size=96), planned=plan)
        rank = warmed(clock, monkeypatch, experts=Experts(), runner=runner)
        assert (rank.experts.restarted, rank.experts.collected) == (1, 1)
    assert begun == [("offload", ())]


@pytest.mark.parametrize(
    ("mode", "prefixes", "planned", "offload", "shares"),
    [
        ("elastic", True, True, True, True), ("fixed", True, True, True, False), ("elastic", False, True, True, False),
        ("elastic", True, False, True, False), ("elastic", True, True, False, False),
    ],
)  # fmt: skip
def test_what_a_rank_is_made_of(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, mode: str, prefixes: bool, planned: bool, offload: bool, shares: bool
) -> None:
    def named(name: str) -> Any:
        return lambda *of, **more: (name, *of, *more.items())

    scheduler = SimpleNamespace(limits=SimpleNamespace(prefixes=prefixes), caches="caches")
    loops: list[Any] = []

    def loop(*of: Any, serving: bool) -> Any:
        loops.append((*of, serving))
        return SimpleNamespace(scheduler=scheduler)

    monkeypatch.setattr(worker, "Loop", loop)
    for name in ("Control", "ExpertTotals", "ExpertNews", "Shares", "PrefillRate"):
        monkeypatch.setattr(worker, name, named(name))
    monkeypatch.setattr(worker, "stop_ids", named("stop_ids"))
    case = SimpleNamespace(
        parallel_config=SimpleNamespace(comm_timeout_s=60), cache_config=SimpleNamespace(page_size=4),
        offload_config=SimpleNamespace(mode=mode),
    )  # fmt: skip
    engine = SimpleNamespace(offload="offload" if offload else None)
    runner: Any = SimpleNamespace(
        case=case, engine=engine, folder="folder", config=SimpleNamespace(eos_token_ids=(9,)),
        ranks=SimpleNamespace(rank=1, world_size=2),
        planned=SimpleNamespace(prompt_step_s="step_s") if planned else None,
    )  # fmt: skip
    rank: Any = Worker(runner, None)
    ids = ("stop_ids", "folder", (9,))
    assert (rank.stop_ids, loops) == (ids, [(engine, ids, True)])
    assert rank.control == ("Control", 1, 2, 60)
    totals = ("ExpertTotals", "offload") if offload else None
    assert (rank.experts, rank.news) == (totals, ("ExpertNews", totals) if offload else None)
    assert rank.shares == (("Shares", "caches", totals, "step_s") if shares else None)
    assert rank.prefill_rate == ("PrefillRate", 4)
    assert not rank.pace.costs.any()
    assert (rank.steps, rank.preemptions, rank.drafted, rank.accepted, rank._generated) == (0, 0, 0, 0, 0)
    assert (rank.stopping, rank.watched, rank._reported, rank._shown) == (False, False, 0.0, 0.0)
    assert rank._since == (1000.0, 0)
    assert (rank._step_tokens, rank._arrived, rank._queued_s) == ([], {}, {})
