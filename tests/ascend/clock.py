"""The fake device's clock: when each task that streams were given would begin and end, by rates of its link, its memory
and its products (planner.streams.py). The fake device itself runs tasks at once; times follow from its log.

    with device_log() as log:
        step()
    assert timed(log.given, RATES, cpu_seconds).overlap > 0.9 and not races(log.given)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from umbra.planner.streams import CPU, DEVICE, LINK_IN, LINK_OUT, QueueTrace, Simulation

Ranges = list[tuple[int, int]]  # first byte, end


@dataclass(frozen=True)
class Rates:
    link: float  # bytes a second, each way
    read: float  # bytes a second of the device's memory
    multiply: float  # operations a second
    launch: float  # seconds of the host for a call


def timed(given: list[str], rates: Rates, cpu: Callable[[int], float]) -> QueueTrace:
    """`cpu`: the seconds of the n-th host function."""
    simulation, events, functions = Simulation(), dict[str, int](), 0
    for stream, text, memory in map(_parts, given):
        kind, _, rest = text.partition(" ")
        if kind == "synchronize":
            last = simulation.last
            one = {"stream": last.get(stream), "event": events.get(rest.removeprefix("event "))}.get(rest.split()[0])
            simulation.add(text, "host", after=[*last.values()] if rest == "device" else [] if one is None else [one])
            continue
        launch = simulation.add("launch", "host", rates.launch)
        seconds, resource, after = 0.0, "", [launch]
        if kind == "record":
            events[rest] = len(simulation.work)
        elif kind == "wait":
            after += [events[rest]] if rest in events else []  # or it happened before the log
        elif text == "host function":
            seconds, resource, functions = cpu(functions), CPU, functions + 1
        elif kind == "memcpy":
            *_, way, nbytes = rest.split()
            resource = {"H2D": LINK_IN, "D2H": LINK_OUT}.get(way, DEVICE)
            seconds = int(nbytes) / (rates.read if resource == DEVICE else rates.link)
        elif kind.startswith("aclnn"):
            seconds, resource = _kernel_seconds(text, memory, rates), DEVICE
        elif kind != "memset":
            raise ValueError(f"the clock does not know {text!r}")
        simulation.add(text, stream or "host", seconds, resource, after)
    return simulation.run()


def _kernel_seconds(text: str, memory: Ranges, rates: Rates) -> float:
    shapes = [[int(size) for size in shape.split(",")] for shape in re.findall(r"\(([\d,]+)\)\w", text)]
    sizes = [end - first for first, end in memory]
    moved, multiplied = sum(sizes), 0
    if "IndexSelect" in text:  # of which only some rows are read
        moved = sum(sizes[1:]) + sizes[-1]
    elif "Matmul" in text or "aclnnMm" in text:
        multiplied = 2 * shapes[0][0] * shapes[0][-1] * shapes[-1][-1]
    return max(moved / rates.read, multiplied / rates.multiply)


def races(given: list[str]) -> list[tuple[str, str]]:
    """A copy to the device and a kernel of another stream on the same memory, neither of which waits for the other."""
    events, last, before = dict[str, int](), dict[str, int](), list[int]()  # bits: the lines that came to an end before
    host, everything, tasks = 0, 0, list[tuple[int, str, str, Ranges]]()
    for number, (stream, text, memory) in enumerate(map(_parts, given)):
        kind, _, rest = text.partition(" ")
        seen = host | last.get(stream, 0)
        if kind == "wait":
            seen |= events.get(rest, 0)
        if kind == "synchronize":
            host |= {"d": everything, "s": last.get(stream, 0)}.get(rest[0], events.get(rest.removeprefix("event "), 0))
        before.append(seen)
        last[stream] = seen | 1 << number
        everything |= last[stream]
        if kind == "record":
            events[rest] = last[stream]
        if memory:
            tasks.append((number, stream, text, memory))
    unordered = []
    for i, on, copy, to in tasks:
        if not copy.startswith("memcpy async H2D"):
            continue
        first, end = to[-1]
        for j, stream, text, memory in tasks:
            ordered = before[max(i, j)] >> min(i, j) & 1
            if stream != on and not ordered and any(a < end and first < b for a, b in memory):
                unordered.append((copy, text))
    return unordered


def touching(given: list[str], memory: range) -> list[str]:
    """The tasks that read or write some of this memory."""
    parts = map(_parts, given)
    return [text for _, text, of in parts if any(a < memory.stop and memory.start < b for a, b in of)]


def _parts(line: str) -> tuple[str, str, Ranges]:
    """-> stream, what it is given, and the memory that it reads and writes"""
    stream, _, rest = line.partition(" ")
    text, _, memory = rest.partition(" | ")
    pairs = (map(int, pair.split(":")) for pair in memory.split())
    return stream if stream != "0" else "", text, [(first, first + size) for first, size in pairs]
