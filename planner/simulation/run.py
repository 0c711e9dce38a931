"""The simulation itself: events in order of time. Equal seeds give equal results."""

import heapq
import itertools
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from umbra.base.errors import UserError
from umbra.cpu_offload.planner.choices import COPYING, MOST_SWAPS
from umbra.executor.plan.batch_limits import Limits
from umbra.planner.cluster import SimulationSettings
from umbra.planner.layouts import Layout
from umbra.planner.simulation.experts import INTERVAL, ExpertSizes, SimulatedExperts
from umbra.planner.simulation.replica import Replica
from umbra.planner.simulation.router import GONE, ReplicaRouter
from umbra.planner.simulation.steps import StepTimes
from umbra.planner.simulation.traffic import HOUR, Arrival, arrivals
from umbra.planner.times import GIGA, US

STEP, FAIL, LOSE_NODE, RETURN = range(4)  # kinds of events; of two at the same time the lower kind comes first


@dataclass(slots=True)
class RequestRecord:
    """The record of one request; times in seconds."""

    at: float  # when it came
    prompt: int  # tokens
    output: int
    first: float = 0.0  # when its first token came
    last: float = 0.0  # when its last token came; 0: it never did
    restarts: int = 0  # how often it was lost with a replica and began again


@dataclass
class SimulationOutcome:
    served: dict[int, RequestRecord] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    end: float = 0.0
    failures: int = 0  # of replicas
    refused: int = 0  # requests that can never run


def shadowed(layout: Layout, simulation: SimulationSettings) -> SimulatedExperts:
    """The experts of a replica's first rank, which stands for all."""
    counted, ranks = layout.counted, layout.sizes
    case, config, memory = counted.case, counted.config, counted.memory
    layers, all_experts, slot = counted.expert_layers, config.expert_count, slot_bytes_of(layout)
    experts = all_experts // ranks.moe_ep
    fixed = None if simulation.memory == "elastic" else round(ranks.resident * layers * experts)
    copy_s = slot / (layout.hardware.need("host.copy_gbps") * GIGA)
    swaps = min(max(int(layout.decode(1).total / COPYING / copy_s), 1), MOST_SWAPS)  # of a server, after every step
    sizes = ExpertSizes(
        layers,
        experts,
        all_experts,
        config.experts_per_token,
        slot,
        memory.page,
        case.cache_config.page_size,
        int(layout.all_free_bytes),
        copy_s,
        INTERVAL * swaps,
        counted.units,
        counted.states,
    )
    return SimulatedExperts(sizes, fixed, simulation.skew, simulation.seed)


def slot_bytes_of(layout: Layout) -> int:
    """Bytes of an expert of the layout's ranks."""
    counted = layout.counted
    return counted.memory.experts // (counted.expert_layers * (counted.config.expert_count // layout.sizes.moe_ep))


class Simulator:
    def __init__(self, layout: Layout, simulation: SimulationSettings, times: StepTimes | None = None):
        """`times` are the layout's step times, if they are not modelled."""
        sizes, cluster, case = layout.sizes, layout.cluster, layout.counted.case
        self.simulation, self.layout = simulation, layout
        size, elastic = case.cache_config.page_size, simulation.memory == "elastic"
        free = layout.all_free_bytes if elastic else layout.free_bytes
        slots = layout.counted.expert_layers > 0 and (layout.sizes.resident < 1 or elastic)
        pages = int(free / layout.counted.memory.page) - 1
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
            prefix_floor=case.serve_config.prefix_floor // size,
            windows=layout.counted.limits.windows,
            set_pages=layout.counted.states.frames(layout.counted.memory.page, slot_bytes_of(layout) if slots else 0),
        )
        if self.limits.pages_of(simulation.longest) > pages:
            raise UserError(
                f"simulation.longest: {simulation.longest} tokens of one sequence do not fit into the {pages} pages of "
                f"a group of {sizes}"
            )
        times = times or StepTimes(layout, simulation.longest)
        shadows = None
        if slots:
            shadows = partial(shadowed, layout, simulation)
        pause_s = 0.0 if simulation.mixed_tokens else case.serve_config.prefill_pause_ms / 1e3
        replicas = [Replica(n, self.limits, pages, times, shadows, pause_s) for n in range(sizes.replicas)]
        self.outcome = SimulationOutcome(replicas=replicas)
        self.router = ReplicaRouter(simulation.router, size, sizes.replicas)
        self.events: list[tuple[float, int, int, int, int]] = []  # (time, kind, order, replica or node, its count)
        self.order = itertools.count()
        self.lives, self.runs = [0] * sizes.replicas, [0] * sizes.replicas  # of each replica: older events do not count
        self.back = [0.0] * sizes.replicas  # when a replica that failed last returned, or will
        self.fronts = [0.0] * sizes.replicas  # when each replica's front has passed on its tokens so far
        self.choose = np.random.default_rng([simulation.seed, 2])
        self.open: dict[int, Arrival] = {}  # requests that have not ended
        self.held: list[int] = []  # those of them that wait because no replica is alive

    def run(self) -> SimulationOutcome:
        """Serves all requests to their ends."""
        coming = enumerate(arrivals(self.layout.cluster.load, self.simulation))
        arrived = next(coming, None)
        front = self.simulation.front_ms / 1e3
        for replica in self.outcome.replicas:
            self._plan_failure(replica, 0.0)
        for node in self._nodes():
            self._plan_loss(node, 0.0)
        while arrived or self.open:
            if arrived and (not self.events or arrived[1].at + front <= self.events[0][0]):
                id, arrival = arrived
                self.outcome.served[id] = RequestRecord(arrival.at, len(arrival.prompt), arrival.output)
                self.open[id] = arrival
                self._send(id, arrival.at + front)
                arrived = next(coming, None)
                continue
            now, kind, _, number, count = heapq.heappop(self.events)
            if kind == LOSE_NODE:
                self._lose_node(number, now)
                continue
            replica = self.outcome.replicas[number]
            if count != (self.runs if kind == STEP else self.lives)[number]:
                continue
            self.outcome.end = max(self.outcome.end, now)
            if kind == STEP:
                self._end_step(replica, now)
            elif kind == FAIL:
                self._fail(replica, now, self.simulation.restart_s)
            else:
                self._return(replica, now)
        return self.outcome

    def _send(self, id: int, now: float) -> None:
        """Gives the request to a replica."""
        if not self.router.alive:
            self.held.append(id)
            return
        arrival = self.open[id]
        number = self.router.choose(arrival.prompt)
        replica = self.outcome.replicas[number]
        try:
            replica.add(id, arrival)
        except UserError:
            self.outcome.refused += 1
            del self.outcome.served[id], self.open[id]
            return
        self.router.loads[number] += 1
        if replica.run is None:
            self._begin_step(replica, now)
        else:
            self._step_until(replica, replica.cut(now))

    def _begin_step(self, replica: Replica, now: float) -> None:
        self._step_until(replica, replica.begin(now))

    def _step_until(self, replica: Replica, end: float | None) -> None:
        if end is not None:
            self.runs[replica.number] += 1
            self._at(end, STEP, replica.number, self.runs[replica.number])

    def _end_step(self, replica: Replica, now: float) -> None:
        sent = max(now, self.fronts[replica.number])
        passing = self.simulation.front_token_us * US * len(replica.run.ends) if replica.run else 0.0
        for id, last in replica.end():
            sent += passing
            served = self.outcome.served[id]
            served.first = served.first or sent
            if last:
                served.last = sent
                del self.open[id]
                self.router.loads[replica.number] -= 1
        self.fronts[replica.number] = sent
        self._begin_step(replica, now)

    def _fail(self, replica: Replica, now: float, seconds: float) -> None:
        """Loses a replica for so long; one that is lost already, for at least so long."""
        number, alive = replica.number, self.router.loads[replica.number] < GONE
        self.lives[number] += 1
        self.runs[number] += 1
        self.back[number] = max(self.back[number], now + seconds)
        self._at(self.back[number], RETURN, number, self.lives[number])
        if alive:
            self.outcome.failures += 1
            self.router.lose(number)
            for id in replica.lose(now):
                served = self.outcome.served[id]
                served.restarts, served.first = served.restarts + 1, 0.0
                self._send(id, now)

    def _lose_node(self, node: int, now: float) -> None:
        """Loses all replicas that have ranks on the node."""
        world, devices = self.layout.sizes.world, self._node_devices()
        first, last = node * devices // world, ((node + 1) * devices - 1) // world
        for replica in self.outcome.replicas[first : last + 1]:
            self._fail(replica, now, self.simulation.node_restart_s)
        self._plan_loss(node, now + self.simulation.node_restart_s)

    def _return(self, replica: Replica, now: float) -> None:
        self.router.regain(replica.number)
        self._plan_failure(replica, now)
        held, self.held = self.held, []
        for id in held:
            self._send(id, now)

    def _node_devices(self) -> int:
        return int(self.layout.hardware.need("host.devices"))

    def _nodes(self) -> range:
        """Numbers of the nodes, if they fail."""
        if not self.simulation.node_failure_hours:
            return range(0)
        return range(-(-self.layout.cluster.devices // self._node_devices()))

    def _plan_failure(self, replica: Replica, now: float) -> None:
        """Plans when the first of the replica's ranks fails."""
        if hours := self.simulation.rank_failure_hours:
            seconds = float(self.choose.exponential(hours * HOUR / self.layout.sizes.world))
            self._at(now + seconds, FAIL, replica.number, self.lives[replica.number])

    def _plan_loss(self, node: int, now: float) -> None:
        self._at(now + float(self.choose.exponential(self.simulation.node_failure_hours * HOUR)), LOSE_NODE, node, 0)

    def _at(self, time: float, kind: int, number: int, count: int) -> None:
        heapq.heappush(self.events, (time, kind, next(self.order), number, count))
