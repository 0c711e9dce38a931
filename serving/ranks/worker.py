"""The program of each rank of a server: it steps the engine on the requests that the front sends to rank 0.

Rank 0 shares one tick before each step; when nothing is to do, ranks wait for the next one, which comes at least every
few seconds, so that a dead rank is noticed and no collective waits for long.
"""

import argparse
import faulthandler
import functools
import gc
import itertools
import signal
import time
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from umbra.base.errors import UserError, refusal
from umbra.base.progress import listeners
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.executor.config import env
from umbra.executor.config.case import Case
from umbra.executor.config.resolved import read_resolved
from umbra.executor.engine.drafts.drafts import SIZES
from umbra.executor.engine.memory.expert_totals import ExpertTotals
from umbra.executor.engine.memory.memory_split import MemorySplit
from umbra.executor.engine.schedule.prompt_costs import PromptCosts, amounts_of, first_prompt, next_prompt
from umbra.executor.engine.schedule.request import Event, Request, SamplingParams
from umbra.executor.engine.schedule.scheduler import Step
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.disk_prefixes import DiskPrefixes
from umbra.executor.engine.step.loop import Loop
from umbra.executor.engine.step.timings import PrefillRate, Timings
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.ops.parallel.connections import readable_connection_errors
from umbra.serving.ranks.channel import Channel
from umbra.serving.ranks.expert_news import ExpertNews
from umbra.serving.ranks.matchers import Matchers
from umbra.serving.ranks.messages import (
    Abort,
    ChannelMessage,
    Fatal,
    GroupPages,
    Out,
    Ping,
    Pong,
    Prepare,
    Progress,
    Ready,
    Refused,
    Row,
    Running,
    State,
    Stop,
    Submit,
    Tick,
    Watch,
)
from umbra.serving.ranks.processes import run_and_leave
from umbra.serving.ranks.ticks import TickBroadcast

IDLE_S = 2.0  # seconds between two ticks while nothing is to do
STATE_S = 0.25
RESIDENCY_S = 1.0
FLUSH_S = 5.0  # most seconds that the end of a server waits for prefixes to be on disk
COPY_S, COPY_BYTES = 0.005, 16 << 20  # while nothing is to do: seconds between two copies of prefixes, and their bytes
FORGET_STEPS = 64  # steps whose records are kept at most
MOST_STEP_TOKENS = 1024  # steps of which a snapshot gives the tokens
QUEUE_SHOWN = 16  # waiting requests in a snapshot


class FrontEnd(Protocol):
    """The interface of a worker's connection to the front; `Channel` is one."""

    @property
    def behind(self) -> bool: ...

    def send(self, message: ChannelMessage) -> None: ...

    def receive(self, wait_s: float) -> ListOf[Any]: ...


class Worker:
    """`channel` is rank 0's connection to the front; the other ranks have None. `matchers` are those of the runner, if
    they were made before its weights were read."""

    def __init__(self, runner: ModelRunner, channel: FrontEnd | None, matchers: Matchers | None = None):
        self.runner, self.channel = runner, channel
        case, engine = runner.case, runner.engine
        self.case, self.engine = case, engine
        self.stop_ids = stop_ids(runner.folder, runner.config.eos_token_ids)
        self.matchers = matchers or matchers_of(runner)
        self.loop = Loop(engine, self.stop_ids, serving=True)
        self.control = TickBroadcast(runner.ranks.rank, runner.ranks.world_size, case.parallel_config.comm_timeout_s)
        self.experts = ExpertTotals(engine.shadows) if engine.shadows else None
        self.news = ExpertNews(self.experts) if self.experts else None
        self.memory_split = None
        elastic = case.offload_config.mode == "elastic" and self.loop.scheduler.limits.prefixes
        if self.experts and runner.planned and elastic:
            self.memory_split = MemorySplit(self.loop.scheduler.caches, self.experts, runner.planned.prompt_step_s)
        self.steps = self.preemptions = self.drafted = self.accepted = self.generated = 0
        self.disk: DiskPrefixes | None = None  # once the warm-up is over
        self.prefill_rate = PrefillRate(case.cache_config.page_size)
        self.prompt_costs = PromptCosts()
        self.stopping = False
        self.watched = False  # whether somebody wants to see where experts are
        self._reported = 0.0  # time of the last State
        self._shown = 0.0  # time of the last Residency
        self._since = (time.perf_counter(), 0)  # time and tokens at the last State
        self._step_tokens: list[int] = []  # since the last State
        self._compiling: list[Submit] = []  # requests whose grammars rank 0 compiles
        self._arrived: dict[int, float] = {}  # id -> time, of requests that have not begun
        self._queued_s: dict[int, float] = {}  # id -> how long it waited, of requests without a first row

    def run(self) -> None:
        """Serves until the front stops the ranks."""
        with self.engine.platform.watched():
            self.warm_up()
            self.open_disk()
            gc.collect()
            gc.freeze()  # collections no longer look through what was loaded, which takes as long as many steps
            self.matchers.wait()
            if self.channel:
                self.channel.send(self.ready())
            while not self.stopping:
                self.turn()
            if self.disk:
                self.disk.finish(FLUSH_S)

    @property
    def idle(self) -> bool:
        return self.loop.idle and not self._compiling

    def turn(self) -> None:
        """Shares one tick, and runs its step. Rank 0 decides on the step before it shares the tick, and every other
        rank compares its own decision before it runs the step, so that ranks that differ end here instead of waiting
        for each other in a collective."""
        scheduler = self.loop.scheduler
        if self.channel:
            tick = self.next_tick(self.channel)
            self.apply(tick)
            step = scheduler.schedule()
            if not self.control.alone:
                self.control.share(replace(tick, digest=scheduler.digest(step)))
        else:
            tick = self.control.share(None)
            self.apply(tick)
            step = scheduler.schedule()
            self.check(tick, scheduler.digest(step))
        self.step(step)
        if self.steps % FORGET_STEPS == 0:
            self.forget()

    def next_tick(self, channel: FrontEnd) -> Tick:
        """Rank 0's tick: the messages that have come from the front, and what it has measured."""
        events: list[Submit | Abort | Prepare | Stop] = []
        idle_s = COPY_S if self._compiling or (self.disk and self.disk.pending) else IDLE_S
        for message in channel.receive(0 if not self.loop.idle else idle_s):
            if message is None:
                events.append(Stop())
            elif isinstance(message, OSError):
                raise message
            elif isinstance(message, Ping):
                channel.send(Pong(message.number, self.steps))
            elif isinstance(message, Watch):
                self.watched = message.residency
            elif isinstance(message, Submit) and (grammar := message.sampling.grammar):
                self._compiling.append(message)
                events.append(Prepare(message.id, grammar))
            elif isinstance(message, Submit | Abort | Stop):
                events.append(message)
        events += self.compiled([event.id for event in events if isinstance(event, Abort)])
        self.report(channel)
        if self.memory_split and self.prefill_rate.value:
            self.memory_split.decide(self.case.cache_config.page_size / self.prefill_rate.value)
        pause_s = self.case.serve_config.prefill_pause_ms / 1000
        return Tick(
            self.steps,
            0,
            self.mixed_tokens(),
            self.memory_split.expert_pages if self.memory_split else 0,
            events,
            self.disk.decide(self.prefill_rate.value, pause_s) if self.disk else 0,
        )

    def compiled(self, aborted: ListOf[int]) -> ListOf[Submit]:
        """The requests whose grammars have been compiled since the last tick, but for those that are `aborted`."""
        known = [s for s in self._compiling if s.id not in aborted]
        self._compiling = [s for s in known if not self.matchers.is_ready(s.id)]
        return [s for s in known if s not in self._compiling]

    def check(self, tick: Tick, own: int) -> None:
        """Raises unless this rank, whose digest is `own`, does what rank 0 does."""
        if (tick.number, tick.digest) != (self.steps, own):
            raise RuntimeError(
                f"rank {self.runner.ranks.rank} differs from rank 0 at step {tick.number}: its step {self.steps} has "
                f"the digest {own:016x}, rank 0's {tick.digest:016x}"
            )

    def apply(self, tick: Tick) -> None:
        """Bookkeeping of what has come since the last step, on every rank alike."""
        scheduler = self.loop.scheduler
        scheduler.mixed_tokens, scheduler.expert_pages = tick.mixed_tokens, tick.expert_pages
        if self.disk:
            self.disk.most = tick.restored
        for event in tick.events:
            if isinstance(event, Submit):
                try:
                    self.loop.submit(event.request, event.id, self.matchers.take(event.id))
                    if self.channel:
                        self._arrived[event.id] = time.perf_counter()
                except UserError as error:
                    if self.channel:
                        self.channel.send(Refused(event.id, str(error)))
            elif isinstance(event, Prepare):
                self.matchers.start(event.id, event.grammar)
            elif isinstance(event, Abort):
                self.matchers.drop(event.id)
                self.loop.abort(event.id)
            else:
                self.stopping = True

    def step(self, step: Step | None) -> None:
        """Runs a step of the engine, if there is something to do."""
        begun, timings = time.perf_counter(), self.loop.timings
        if self.disk:
            step = self.disk.restore(step)
        start = time.perf_counter()
        before, decoded = timings.prompt_tokens, timings.decode_tokens
        drafted, accepted = timings.drafted_tokens, timings.accepted_tokens
        amounts = amounts_of(step.sequences if step else ())
        events = self.loop.run(step)
        self.steps += 1
        for sequence in self.loop.scheduler.preempted:
            self.preemptions += 1
            again = len(sequence.ids)
            print(f"request {sequence.id} is preempted for want of memory: {again} tokens are computed again later")
        tokens, decoded = timings.prompt_tokens - before, timings.decode_tokens - decoded
        self.drafted += timings.drafted_tokens - drafted
        self.accepted += timings.accepted_tokens - accepted
        seconds = time.perf_counter() - start
        if tokens:
            self.prompt_costs.learn(amounts, seconds)
        self.prefill_rate.learn(tokens, seconds)
        if self.experts:
            self.experts.prefilled(tokens)
        self.generated += sum(len(event.tokens) for event in events)
        if tokens + decoded:
            self._step_tokens.append(tokens + decoded)
        if self.channel:
            self.tell(self.channel, events, begun)
        if self.disk:
            self.disk.ended([s for s in step.sequences if s.finish_reason] if step else [])
            self.disk.copy(COPY_BYTES if self.loop.idle else 1)

    def tell(self, channel: FrontEnd, events: ListOf[Event], start: float) -> None:
        """Sends the front the rows of a step that began at `start`."""
        for id in (*(s.id for s in self.loop.scheduler.running), *(event.id for event in events)):
            if (arrived := self._arrived.pop(id, None)) is not None:
                self._queued_s[id] = start - arrived
        rows = []
        for event in events:
            queued_s = self._queued_s.pop(event.id, 0.0)
            if event.finish_reason != "abort":
                id, tokens, finish, cached_tokens, logprobs, prompt_logprobs, drafted, restored = event
                given = logprobs, prompt_logprobs, drafted, queued_s, restored
                rows.append(Row(id, list(tokens), finish, cached_tokens, *given))
        if rows:
            channel.send(Out(self.steps, rows))

    def forget(self) -> None:
        """Drops what is recorded of each step, which would grow for as long as the server runs."""
        self.loop.timings = Timings()
        if self.experts:
            self.experts.collect()
        del self._step_tokens[:-MOST_STEP_TOKENS]

    def mixed_tokens(self) -> int:
        """Most prompt tokens of a step in which requests decode."""
        pause_s, scheduler = self.case.serve_config.prefill_pause_ms / 1000, self.loop.scheduler
        limits = scheduler.limits
        return self.prompt_costs.mixed_tokens(scheduler.running, limits.page_size, pause_s, limits.prefill_tokens)

    def warm_up(self) -> None:
        """Runs prompts of growing length to learn prefill times, then decodes once with every batch size, and with
        drafts every row count, so that all graphs are captured."""
        scheduler = self.loop.scheduler
        batch, longest = scheduler.limits.batch_size, scheduler.limits.max_sequence_length
        numbers = itertools.count(1)

        def add(length: int, tokens: int) -> None:
            number = next(numbers)
            ids = tuple((number * 7919 + i) % self.runner.config.vocab_size for i in range(length))
            sampling = SamplingParams(max_tokens=min(tokens, longest - length), ignore_eos=True)
            self.loop.submit(Request(ids, sampling), -number)

        def prefill(length: int) -> float:
            add(length, 1)
            start = time.perf_counter()
            while not self.loop.idle:
                self.step(scheduler.schedule())
            return time.perf_counter() - start

        page, pages = scheduler.limits.page_size, scheduler.pools[0].pages
        length = first_prompt(page, longest)
        prefill(length)  # the first time takes longer and says nothing
        self.prompt_costs, self.prefill_rate.value = PromptCosts(), 0.0
        while length:
            seconds = prefill(length)
            # Rank 0's clock decides for all.
            length = self.control.number(next_prompt(length, seconds, page, pages, longest))
        drafts, scheduler.drafts = scheduler.drafts, None
        sizes = [size for size in SIZES if batch < size <= self.case.decode_rows] if drafts else []
        for _ in range(batch):
            # Until the last one decodes, and one step more for each that ends before; a step with drafts may give all.
            add(1, batch + 2 + len(sizes) * (1 + scheduler.limits.draft_tokens))
        for ended in range(batch):
            step = None
            while not self.loop.idle and not (step and step.decode):
                step = scheduler.schedule()
                self.step(step)
            if drafts and not ended:
                scheduler.drafts = drafts
                for size in sizes:
                    drafts.fill(size)
                    self.step(scheduler.schedule())
                scheduler.drafts = None
            if self.channel:
                self.channel.send(Progress("warming up", (ended + 1) / batch))
            if step:
                self.loop.abort(min(step.sequences, key=lambda s: s.arrival).id)
        while not self.loop.idle:
            self.step(scheduler.schedule())
        scheduler.drafts = drafts
        for cache in scheduler.caches:
            cache.trim(0)
        self.forget()
        self._step_tokens = []
        self.steps = self.preemptions = self.drafted = self.accepted = self.generated = 0
        if self.experts:
            self.experts.restart()
            if self.runner.planned:  # most steps of the warm-up captured a graph: their times say nothing
                self.runner.planned.begin(self.experts.shadows, ())

    def open_disk(self) -> None:
        """Finds the prefixes that earlier servers have left."""
        if self.case.cache_config.disk_path:
            self.disk = DiskPrefixes(self.engine, self.loop.scheduler, self.runner.ranks.local_world_size)

    def ready(self) -> Ready:
        limits, pool = self.loop.scheduler.limits, self.loop.scheduler.pools[0]
        return Ready(
            longest=limits.longest_in(pool.pages),
            batch_size=limits.batch_size,
            vocabulary=self.runner.config.vocab_size,
            page_size=limits.page_size,
            pages=pool.pages,
            groups=limits.groups,
            stop_ids=sorted(self.stop_ids),
            prefill_rate=self.prefill_rate.value,
            results=str(self.runner.results),
        )

    def report(self, channel: FrontEnd) -> None:
        """Sends the front a snapshot, a few times a second, and where experts are, if somebody watches."""
        now = time.perf_counter()
        if now - self._reported < STATE_S or channel.behind:
            return
        since, generated = self._since
        self._reported, self._since = now, (now, self.generated)
        self.forget()
        scheduler, pages = self.loop.scheduler, self.loop.scheduler.pools[0]
        groups = [
            GroupPages(
                cache.held, scheduler.committed(g) - cache.held, cache.kept, cache.live_states, cache.kept_states
            )
            for g, cache in enumerate(scheduler.caches)
        ]
        state = State(
            step=self.steps,
            waiting=len(scheduler.waiting),
            running=[running_of(s) for s in scheduler.running],
            queue=[running_of(s) for s in scheduler.waiting[:QUEUE_SHOWN]],
            groups=groups,
            preemptions=self.preemptions,
            drafted=self.drafted,
            accepted=self.accepted,
            step_tokens=self._step_tokens,
            prefill_rate=self.prefill_rate.value,
            decode_rate=(self.generated - generated) / (now - since),
            set_frames=pages.set_pages,
            arena_frames=pages.pages,
            free_frames=pages.pages - groups[0].held - groups[0].kept,
        )
        self._step_tokens = []
        if self.news:
            state = replace(state, **self.news.fields())
            if self.watched and now - self._shown >= RESIDENCY_S and (residency := self.news.changed()):
                self._shown = now
                channel.send(residency)
        channel.send(state)


def running_of(sequence: Sequence) -> Running:
    return Running(
        id=sequence.id,
        prompt=sequence.prompt_len,
        num_computed=sequence.num_computed,
        generated=len(sequence.generated),
        longest=sequence.longest,
        preemptions=sequence.preemptions,
    )


def matchers_of(runner: ModelRunner) -> Matchers:
    ends = stop_ids(runner.folder, runner.config.eos_token_ids)
    return Matchers(runner.folder, runner.config.vocab_size, ends)


def serve(case: Case, results: Path, ranks: env.RankEnv) -> None:
    """The body of one rank: connects, loads, serves."""
    stacks = open(results / f"stacks{ranks.rank}.log", "w")  # noqa: SIM115 (until the end)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the front ends the ranks
    channel = open_channel() if ranks.rank == 0 else None
    try:
        if channel:
            listeners.append(functools.partial(_tell, channel))
        runner = make_runner(case, results, ranks)
        with readable_connection_errors():
            matchers = matchers_of(runner)
            runner.setup()
            Worker(runner, channel, matchers).run()
    except Exception as error:
        if channel:
            plain = isinstance(error, UserError | ConnectionError)
            known = str(error) if plain else refusal(error)
            channel.send(Fatal(known or f"{type(error).__name__}: {error}"))
        raise
    finally:
        if channel:
            listeners.clear()
            channel.close()


def _tell(channel: Channel, what: str, share: float) -> None:
    channel.send(Progress(what, share))


def open_channel() -> Channel:
    path = env.serve_socket()
    if path is None:
        raise UserError("UMBRA_SERVE_SOCKET is not set: the server's front starts its ranks: bash serve.sh CASE")
    return Channel.connect(path)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Runs one rank of a server; the front starts all of them.")
    parser.add_argument("--results", type=Path, required=True, help="folder of this run")
    parser.add_argument("--resolved", type=Path, required=True, help="the case, as its launcher has written it")
    args = parser.parse_args(argv)
    case = read_resolved(args.resolved)
    run_rank(case, args.results, functools.partial(serve, case), own_results=True)


if __name__ == "__main__":
    run_and_leave(main)
