"""A job whose ranks serve random traffic in lockstep while each rank moves experts at random: requests come, are
aborted, preempted, and find prefixes of others. Rank 0 compares answers with those that the same requests get alone,
and writes what it has counted."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import torch

from tests.fakes.shadow_experts import any_swaps
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.memory.memory_split import MemorySplit
from umbra.executor.engine.memory.page_store import PageStore
from umbra.executor.engine.schedule import states
from umbra.executor.engine.schedule.request import SamplingParams
from umbra.executor.engine.schedule.scheduler import Step
from umbra.executor.engine.step import disk_prefixes
from umbra.executor.engine.step.disk_prefixes import DiskPrefixes
from umbra.executor.engine.step.loop import Loop
from umbra.executor.engine.step.speculation import Speculation
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import make_runner
from umbra.serving.ranks.messages import Abort, ChannelMessage, Out, Prepare, Refused, Row, Stop, Submit, Tick
from umbra.serving.ranks.worker import Worker

VOCABULARY = 96
LONG = b"other" * 1000  # a salt that makes a tick longer than the broadcast that every step makes
FORGET = 25  # steps after which memory loses all prefixes, so that they are read from disk
CROWD = 60  # steps in which many requests come, and then few


def any_share(self: MemorySplit, prefill_s: float) -> None:
    if random.random() < 0.1:
        self.expert_pages = random.randrange(self.pages + 1)


def any_number(self: DiskPrefixes, prefill_rate: float, pause_s: float) -> int:
    return random.choice((0, 1, 3, 1000))


def any_fault(read: Callable[[PageStore, bytes, memoryview], bool]) -> Callable[[PageStore, bytes, memoryview], bool]:
    """`read`, to which now and then a file of this rank is wrong."""

    def tried(self: PageStore, name: bytes, into: memoryview) -> bool:
        if random.random() < 0.03:
            self.index.pop(name, None)
        return read(self, name, into)

    return tried


class Traffic:
    """Stands for the front: the messages of each tick are drawn from `seed`."""

    behind = False

    def __init__(self, steps: int, seed: int):
        self.random, self.steps = random.Random(seed), steps
        self.submitted: list[Submit] = []
        self.rows: dict[int, list[Row]] = {}
        self.refused = 0
        self.aborted = 0

    def receive(self, wait_s: float) -> list[ChannelMessage]:
        self.steps -= 1
        if self.steps <= 0:
            return [Stop()]
        messages: list[ChannelMessage] = []
        crowd = self.steps // CROWD % 2  # in between, experts come back
        while self.random.random() < (0.6 if crowd else 0.03):
            messages.append(self.request())
        if self.submitted and self.random.random() < 0.03:
            self.aborted += 1
            messages.append(Abort(self.random.choice(self.submitted[-6:]).id))
        return messages

    def request(self) -> Submit:
        """Every second prompt begins as an earlier one and its answer, if there is a short one."""
        draw = self.random
        earlier = [
            [*submit.ids, *(t for row in self.rows[submit.id] for t in row.tokens)]
            for submit in self.submitted[-40:]
            if submit.id in self.rows
        ]
        short = [ids for ids in earlier if len(ids) <= 32][-8:]
        start = draw.choice(short) if short and draw.random() < 0.5 else []
        ids = [*start, *(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 8 if start else 20)))]
        hot, again = draw.random() < 0.5, draw.random() < 0.3
        sampling = SamplingParams(
            draw.randint(1, 16),
            0.8 if hot else 0.0,
            seed=draw.randrange(1 << 40),
            ignore_eos=True,
            logit_bias={3: 50.0, 5: 50.0} if again else {},  # which repeat soon
        )
        salt, branches = draw.choice([b"", b"", LONG]), (draw.randint(0, len(ids)), max(0, len(ids) - 3))
        submit = Submit(len(self.submitted), ids, sampling, draw.randint(0, 1), salt, branches)
        self.submitted.append(submit)
        return submit

    def send(self, message: ChannelMessage) -> None:
        if isinstance(message, Out):
            for row in message.rows:
                self.rows.setdefault(row.id, []).append(row)
        self.refused += isinstance(message, Refused)

    def compared(self, alone: list[tuple[int, list[int]]]) -> dict[str, int]:
        """Counts, once every answer, or the part of it that came, is that of its request `alone`."""
        ended = {id for id, rows in self.rows.items() if rows[-1].finish}
        for id, tokens in alone:
            got = [token for row in self.rows.get(id, []) for token in row.tokens]
            assert got == (tokens if id in ended else tokens[: len(got)]), id
        hits = sum(rows[0].cached_tokens > 0 for rows in self.rows.values())
        restored = sum(rows[0].restored_tokens > 0 for rows in self.rows.values())
        whole = len([id for id, _ in alone if id in ended])
        return dict(
            submitted=len(self.submitted),
            ended=len(ended),
            hits=hits,
            refused=self.refused,
            aborted=self.aborted,
            alone=len(alone),
            whole=whole,
            restored=restored,
        )


def any_cost(learn: Callable[..., None]) -> Callable[..., None]:
    """`learn` with a random time of a step, so that ranks would differ if they did not all learn the times of rank 0.
    Further rows are mostly cheap."""
    return lambda speculation, cost: learn(speculation, cost._replace(seconds=(0.01 + random.random()) / cost.rows))


class Watched(Worker):
    """Counts how often an expert of this rank has come or gone, and forgets prefixes."""

    moved = 0

    def step(self, step: Step | None) -> None:
        assert self.engine.shadows
        if self.disk and self.steps % FORGET == 0:
            self.disk.finish(60)
            for cache in self.loop.scheduler.caches:
                cache.trim(0)
        before = self.engine.shadows.published.copy()
        super().step(step)
        self.moved += int((self.engine.shadows.published != before).sum())


def alone(worker: Worker, submit: Submit) -> list[int]:
    """The request's tokens if nothing else runs, nothing is found and nothing is drafted."""
    loop = Loop(worker.engine, worker.stop_ids)
    loop.scheduler.drafts = None
    loop.submit(submit.request, submit.id)
    tokens: list[int] = []
    while not loop.idle:
        tokens += [token for event in loop.step() for token in event.tokens]
    return tokens


def main() -> None:
    _, case_file, steps, out, alone_most, _, folder = sys.argv  # about so many requests run alone afterwards
    case = load_case(case_file)

    def body(results: Path, ranks: RankEnv) -> None:
        random.seed(ranks.rank)
        runner = make_runner(case, results, ranks)
        runner.setup()
        if runner.engine.shadows:
            runner.engine.shadows.residency.swaps = any_swaps  # type: ignore[method-assign]
        MemorySplit.decide = any_share  # type: ignore[method-assign]
        states.INTERVAL = disk_prefixes.DEEP = 8
        DiskPrefixes.decide = any_number  # type: ignore[method-assign]
        PageStore.read = any_fault(PageStore.read)  # type: ignore[method-assign,assignment]
        Speculation.learn = any_cost(Speculation.learn)  # type: ignore[method-assign]
        traffic = Traffic(int(steps), 10)
        worker = Watched(runner, traffic if ranks.rank == 0 else None)
        worker.run()
        counts = {name: getattr(worker, name) for name in ("preemptions", "steps", "moved", "drafted", "accepted")}
        for sequence in [*worker.loop.scheduler.running, *worker.loop.scheduler.waiting]:
            worker.loop.abort(sequence.id)
        for cache in worker.loop.scheduler.caches:
            cache.trim(0)
        counts["held"] = sum(cache.held + cache.kept + cache.sets for cache in worker.loop.scheduler.caches)
        # Rank 0 knows what was asked; the others hear of it as in a tick.
        every = max(1, len(traffic.submitted) // int(alone_most))
        some: list[Submit | Abort | Prepare | Stop] = list(traffic.submitted[::every])
        tick = worker.control.share(Tick(0, 0, None, 0, some) if ranks.rank == 0 else None)
        alone_answers = [(submit.id, alone(worker, submit)) for submit in tick.events if isinstance(submit, Submit)]
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(counts | traffic.compared(alone_answers)))

    with torch.inference_mode():
        run_rank(case, Path(folder), body)


if __name__ == "__main__":
    main()
