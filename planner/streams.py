"""Simulates queues whose work overlaps: the streams of a device, its host, the link between them and the host's cores.

    work    a queue that runs its work in order; what it also waits for; a resource, which works for so many seconds

Work that wants a resource at the same time has equal shares of it, as copies on one link do. Nothing sleeps: times are
those of the simulation.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

LINK_IN, LINK_OUT, DEVICE, CPU = "link to the device", "link to the host", "device", "cpu"


@dataclass(frozen=True)
class QueuedWork:
    name: str
    queue: Hashable
    seconds: float
    resource: str = ""  # "": as much as is wanted of it at once
    after: tuple[int, ...] = ()  # numbers of earlier work that must have ended


@dataclass(frozen=True)
class Span:
    """Work that was done, in seconds from the start."""

    work: QueuedWork
    start: float
    end: float


@dataclass(frozen=True)
class QueueTrace:
    spans: list[Span]  # in the order of the work

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, resource: str) -> float:
        """Seconds in which the resource worked."""
        total = until = 0.0
        for span in sorted((s for s in self.spans if s.work.resource == resource), key=lambda span: span.start):
            total += max(0.0, span.end - max(span.start, until))
            until = max(until, span.end)
        return total

    @property
    def overlap(self) -> float:
        """The time of the busiest resource over that of all: 1 if all else is hidden."""
        return max(map(self.busy, (LINK_IN, LINK_OUT, DEVICE, CPU))) / self.seconds


@dataclass
class Resource:
    """Its share of work grows for all alike, so work ends in the order of the shares at which it is done."""

    shared: bool
    share: float = 0.0  # seconds of work that each had until `now`
    now: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)  # (share, number of the work), a heap

    def advance(self, now: float) -> None:
        self.share += (now - self.now) / (max(len(self.ends), 1) if self.shared else 1)
        self.now = now

    @property
    def next(self) -> float:
        """When its next work ends."""
        return self.now + max(0.0, self.ends[0][0] - self.share) * (len(self.ends) if self.shared else 1)


class Simulation:
    """Takes work in the order in which the host gives it out, and then times it."""

    def __init__(self) -> None:
        self.work: list[QueuedWork] = []
        self.last: dict[Hashable, int] = {}  # queue -> number of its last work

    def add(
        self, name: str, queue: Hashable, seconds: float = 0.0, resource: str = "", after: Sequence[int] = ()
    ) -> int:
        """-> the number of the work. It begins after the work before it on the queue and the work numbered `after`."""
        before = (self.last[queue],) if queue in self.last else ()
        self.work.append(QueuedWork(name, queue, seconds, resource, (*before, *after)))
        self.last[queue] = len(self.work) - 1
        return len(self.work) - 1

    def run(self) -> QueueTrace:
        waiting = [len(work.after) for work in self.work]
        followers: dict[int, list[int]] = defaultdict(list)
        for number, work in enumerate(self.work):
            for before in work.after:
                followers[before].append(number)
        resources = {name: Resource(name != "") for name in {work.resource for work in self.work}}
        starts, ends = ([0.0] * len(self.work) for _ in range(2))
        ready, now = [number for number, count in enumerate(waiting) if not count], 0.0
        while True:
            for number in ready:
                resource = resources[self.work[number].resource]
                resource.advance(now)
                starts[number] = now
                heapq.heappush(resource.ends, (resource.share + self.work[number].seconds, number))
            working = [resource for resource in resources.values() if resource.ends]
            if not working:
                break
            first = min(working, key=lambda resource: resource.next)
            now = first.next
            first.advance(now)
            _, ended = heapq.heappop(first.ends)
            ends[ended], ready = now, []
            for number in followers[ended]:
                waiting[number] -= 1
                ready += [number] * (not waiting[number])
        return QueueTrace([Span(*times) for times in zip(self.work, starts, ends, strict=True)])
