"""The times and rates that a layout's users see under steady traffic.

A replica gets an even share of the requests. Prefills take a share p of its time, so decode steps, which follow each
other without gaps, come 1 / (1 - p) times as late. The number of sequences at once follows from Little's law:

    p         = requests a second * seconds of a prefill / data-parallel groups
    TPOT      = decode step of b sequences a group / (1 - p)
    b * groups = requests a second * output tokens * TPOT
    TTFT      = prefill * (1 + p / (2 (1 - p))): waiting for the prefills before it, as in an M/D/1 queue

Requests come independently of each other and evenly over the groups; lengths are their averages. The simulation knows
bursts and lengths that differ.
"""

from dataclasses import dataclass

from umbra.planner.layouts import Layout


@dataclass(frozen=True)
class Point:
    """A layout with `sequences` sequences a group at once."""

    sequences: int
    rate: float  # requests a second of the whole cluster
    tpot: float  # seconds
    ttft: float  # seconds
    tokens_per_device: float  # output tokens a second


def point(layout: Layout, sequences: int) -> Point:
    """The times that users see if each group always has `sequences` sequences."""
    sizes, load = layout.sizes, layout.cluster.load
    step, prefill = layout.decode(sequences).total, layout.prefill.total
    rate = sizes.attn_dp * sequences / (load.output_tokens * step + sequences * prefill)  # of a replica
    busy = rate * prefill / sizes.attn_dp
    tpot, ttft = step / (1 - busy), prefill * (1 + busy / 2 / (1 - busy))
    tokens = rate * load.output_tokens / sizes.world
    return Point(sequences, rate * sizes.replicas, tpot, ttft, tokens)


def points(layout: Layout) -> list[Point]:
    """Points from one sequence to as many as fit."""
    counts, most = [1], layout.most_sequences
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, counts[-1] * 5 // 4)))
    return [point(layout, count) for count in counts]


def under_load(layout: Layout) -> Point | None:
    """The times that users see at the cluster's rate of requests; None: the layout cannot keep up with it."""
    wanted = layout.cluster.load.rate
    low, high = 1, layout.most_sequences
    if point(layout, high).rate < wanted:
        return None
    while low < high:  # the fewest sequences at once that keep up
        middle = (low + high) // 2
        low, high = (middle + 1, high) if point(layout, middle).rate < wanted else (low, middle)
    return point(layout, low)


def within_targets(layout: Layout) -> Point | None:
    """The most traffic at which both targets hold; None: they hold at none."""
    targets = layout.cluster.targets

    def holds(point: Point) -> bool:
        return point.tpot * 1e3 <= targets.tpot_ms and point.ttft * 1e3 <= targets.ttft_ms

    if not holds(point(layout, 1)):
        return None
    low, high = 1, layout.most_sequences
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(point(layout, middle)) else (low, middle - 1)
    return point(layout, low)
