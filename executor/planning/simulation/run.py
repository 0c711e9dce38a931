"""The simulation itself: events in order of time. Equal seeds give equal results."""

import heapq
import itertools
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from errors import UserError
from executor.engine.scheduler import Limits
from executor.planning.cluster.cluster import Simulation
from executor.planning.cluster.layouts import Layout
from executor.planning.cluster.times import GIGA, US
from executor.planning.simulation.experts import SimulatedExperts, Sizes
from executor.planning.simulation.replica import Replica
from executor.planning.simulation.router import Router
from executor.planning.simulation.steps import StepTimes
from executor.planning.simulation.traffic import Arrival, arrivals

ARRIVE, STEP, FAIL, RETURN = range(4)  # kinds of events; of two at the same time the lower kind comes first


@dataclass
class Served:
    """What happened to a request; times in seconds."""

    at: float  # when it came
    prompt: int  # tokens
    output: int
    first: float = 0.0  # when its first token came
    last: float = 0.0  # when its last token came; 0: it never did
    restarts: int = 0  # how often it was lost with a replica and began again


@dataclass
class Outcome:
    served: dict[int, Served] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    end: float = 0.0
    failures: int = 0
    refused: int = 0  # requests that can never run


def shadowed(layout: Layout, simulation: Simulation) -> SimulatedExperts:
    """The experts of a replica's first rank, which stands for all."""
    counted, ranks = layout.counted, layout.sizes
    case, config, memory = counted.case, counted.config, counted.memory
    layers, all_experts = counted.expert_layers, config.expert_count
    experts = all_experts // ranks.moe_ep
    slot = memory.experts // (layers * experts)
    frame = round(memory.token * case.cache_config.page_size)
    fixed = None if simulation.elastic else round(ranks.resident * layers * experts)
    copy_s = slot / (layout.hardware.need("host.copy_gbps") * GIGA)
    sizes = Sizes(
        layers, experts, all_experts, config.experts_per_token, slot, frame, case.cache_config.page_size,
        int(layout.all_free_bytes), copy_s,
    )  # fmt: skip
    return SimulatedExperts(sizes, fixed, simulation.skew, simulation.seed)


class Simulator:
    def __init__(self, layout: Layout, simulation: Simulation, times: StepTimes | None = None):
        """`times` are the layout's step times, if they are not modelled."""
        sizes, cluster, case = layout.sizes, layout.cluster, layout.counted.case
        self.simulation, self.layout = simulation, layout
        size = case.cache_config.page_size
        free = layout.all_free_bytes if simulation.elastic else layout.free_bytes
        pages = int(free / layout.counted.memory.token / size) - 1
        most = min(cluster.search.most_sequences, pages)
        self.limits = Limits(
            batch_size=most * sizes.attn_dp,
            max_sequence_length=simulation.longest,
            page_size=size,
            groups=sizes.attn_dp,
            prefill_tokens=cluster.search.chunk,
            mixed_tokens=min(simulation.mixed_tokens or cluster.search.chunk, cluster.search.chunk),
            reserve=simulation.reserve,
            prefixes=simulation.prefix_cache,
        )
        if pages * size < simulation.longest:
            raise UserError(
                f"simulation.longest: {simulation.longest} tokens of one sequence do not fit into the {pages * size} "
                f"of a group of {sizes}"
            )
        times = times or StepTimes(layout, simulation.longest)
        made = None
        if layout.sizes.resident < 1 or simulation.elastic:
            made = partial(shadowed, layout, simulation)
        pause_s = 0.0 if simulation.mixed_tokens else case.serve_config.prefill_pause_ms / 1e3
        replicas = [Replica(n, self.limits, pages, times, made, pause_s) for n in range(sizes.replicas)]
        self.outcome = Outcome(replicas=replicas)
        self.alive = list(self.outcome.replicas)
        self.router = Router(simulation.router, size)
        self.events: list[tuple[float, int, int, int, int]] = []  # (time, kind, order, replica, its life)
        self.order, self.lives, self.fronts = itertools.count(), [0] * sizes.replicas, [0.0] * sizes.replicas
        self.choose = np.random.default_rng([simulation.seed, 2])
        self.open: dict[int, Arrival] = {}  # requests that have not ended
        self.held: list[int] = []  # those of them that wait because no replica is alive

    def run(self) -> Outcome:
        """Serves all requests to their ends."""
        coming = iter(enumerate(arrivals(self.layout.cluster.load, self.simulation, self.limits.page_size)))
        arrived, front = next(coming, None), self.simulation.front_ms / 1e3
        for replica in self.outcome.replicas:
            self._plan_failure(replica, 0.0)
        while arrived or self.open:
            if arrived and (not self.events or arrived[1].at + front <= self.events[0][0]):
                id, arrival = arrived
                self.outcome.served[id] = Served(arrival.at, len(arrival.prompt), arrival.output)
                self.open[id] = arrival
                self._send(id, arrival.at + front)
                arrived = next(coming, None)
                continue
            now, kind, _, number, life = heapq.heappop(self.events)
            replica = self.outcome.replicas[number]
            if life != self.lives[number]:
                continue  # of a replica that has failed since
            self.outcome.end = max(self.outcome.end, now)
            if kind == STEP:
                self._end_step(replica, now)
            elif kind == FAIL:
                self._fail(replica, now)
            else:
                self._return(replica, now)
        return self.outcome

    def _send(self, id: int, now: float) -> None:
        """Gives the request to a replica."""
        if not self.alive:
            self.held.append(id)
            return
        arrival = self.open[id]
        replica = self.router.choose(arrival.prompt, self.alive)
        try:
            replica.add(id, arrival)
        except UserError:
            self.outcome.refused += 1
            del self.outcome.served[id], self.open[id]
            return
        if replica.step is None:
            self._begin_step(replica, now)

    def _begin_step(self, replica: Replica, now: float) -> None:
        seconds = replica.begin(now)
        if seconds is not None:
            self._at(now + seconds, STEP, replica)

    def _end_step(self, replica: Replica, now: float) -> None:
        sent = max(now, self.fronts[replica.number])  # when the replica's front has passed on its tokens so far
        for id, last in replica.end():
            sent += self.simulation.front_token_us * US
            served = self.outcome.served[id]
            served.first = served.first or sent
            if last:
                served.last = sent
                del self.open[id]
        self.fronts[replica.number] = sent
        self._begin_step(replica, now)

    def _fail(self, replica: Replica, now: float) -> None:
        self.outcome.failures += 1
        self.lives[replica.number] += 1
        self.alive.remove(replica)
        lost = replica.lose()
        self._at(now + self.simulation.restart_s, RETURN, replica)
        for id in lost:
            served = self.outcome.served[id]
            served.restarts, served.first = served.restarts + 1, 0.0
            self._send(id, now)

    def _return(self, replica: Replica, now: float) -> None:
        self.alive.append(replica)
        self._plan_failure(replica, now)
        held, self.held = self.held, []
        for id in held:
            self._send(id, now)

    def _plan_failure(self, replica: Replica, now: float) -> None:
        if hours := self.simulation.failure_hours:
            self._at(now + float(self.choose.exponential(hours * 3600)), FAIL, replica)

    def _at(self, time: float, kind: int, replica: Replica) -> None:
        event = time, kind, next(self.order), replica.number, self.lives[replica.number]
        heapq.heappush(self.events, event)
