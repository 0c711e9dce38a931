"""Chooses the settings that a case leaves open, from the times that `Planner` predicts. Each choice has a reason.

The hit rates assumed here are those of a curve (hits.py). That of even traffic, in which all experts are used equally
often, is the share of experts that is resident: real text has more hits, so it is a lower bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from umbra.cpu_offload.costs import Costs
from umbra.cpu_offload.planner.hits import Curve, hit_rate
from umbra.cpu_offload.planner.model import Planner

COPYING = 4  # copies may take 1 / COPYING of a step's time
MOST_SWAPS = 32  # copies at one decision; the policy is made for no more
Threads = tuple[int, int]  # threads of the device and of the shadow pool
GAIN = 0.95  # of a layer's time that streaming must be below
T = TypeVar("T")


@dataclass(frozen=True)
class ExplainedChoice(Generic[T]):
    value: T
    why: str


@dataclass(frozen=True)
class Choices:
    threads: ExplainedChoice[Threads]
    slots: ExplainedChoice[int]  # most experts that may be resident at once
    max_swaps: ExplainedChoice[int]  # most copies at one decision
    stream_tokens: ExplainedChoice[int]  # fewest tokens of a step whose experts are streamed; 0: none
    costs: Costs  # as measured with these threads

    def summary(self, planner: Planner, tokens: int) -> list[str]:
        """The lines that a run prints of its plan for steps of `tokens` sequences."""
        shape, (device, shadow), stream = planner.shape, self.threads.value, self.stream_tokens.value
        times = [f"{planner.step_ms(tokens, hit):.2f} at {hit:.0%}" for hit in (0.0, 0.5, 1.0)]
        copied = "none for prompts"
        if stream and self.costs.whole:
            copied += f", which are computed in place from {stream} tokens on"
        elif stream:
            copied = f"most that a prompt of {stream} tokens or more misses"
        return [
            f"shadow experts: {shape.layers} layers, {shape.top_k} of {shape.experts} experts a token; "
            f"{device} thread(s) for the device, {shadow} for the experts that are not on it",
            f"  predicted ms of a step of {tokens} sequence(s), by hit rate: {', '.join(times)}",
            f"  experts copied to the device: at most {self.max_swaps.value} at a decision, {copied} (--verbose: why)",
        ]

    def table(self) -> list[str]:
        """The choices as lines to print."""
        device, shadow = self.threads.value
        never = self.stream_tokens.value == 0
        return [
            f"  threads           {device} + {shadow}: {self.threads.why}",
            f"  slots             {self.slots.why}",
            f"  max_swaps         {self.max_swaps.value}: {self.max_swaps.why}",
            f"  stream_tokens     {'never' if never else self.stream_tokens.value}: {self.stream_tokens.why}",
        ]


def given(value: int) -> ExplainedChoice[int]:
    return ExplainedChoice(value, "given")


@dataclass(frozen=True)
class ArenaSplit:
    """The sizes that decide how an arena can be divided between KV pages and slots."""

    frames: int  # frames for pages and slots together
    extent_frames: int
    extent_slots: int
    longest: int  # pages of one sequence at its longest
    sequences: int  # most sequences that run at once
    experts: int  # number of experts in all layers with shadows
    curve: Curve = ()  # hit rates

    def slots(self, pages: int) -> int:
        """Number of experts that fit with `pages` pages."""
        extents = max(0, self.frames - pages) // self.extent_frames
        return min(self.experts, extents * self.extent_slots)

    def hit(self, slots: int) -> float:
        """The hit rate with so many resident experts."""
        return hit_rate(self.curve, slots / self.experts)

    @property
    def usual_hit(self) -> float:
        """The hit rate while all sequences are half as long as they may become."""
        return self.hit(self.slots(self.longest * self.sequences // 2))


def divisions(cores: int, device: int, device_given: bool, shadow: int | None) -> list[Threads]:
    """Returns the divisions of the cores that are worth measuring. `device` is the number of the device's threads,
    given by the case or, if not `device_given`, the number that reads memory at full speed. `shadow` is the number of
    threads of the shadow pool, or None if the case leaves it open."""
    shadows = [shadow] if shadow else sorted({1, max(1, cores // 4), max(1, cores // 2)})
    if device_given:
        return [(device, pool) for pool in shadows]
    return sorted({(max(1, min(device, cores - pool)), pool) for pool in shadows} | {(device, shadows[0])})


def choose_threads(tried: Mapping[Threads, Planner], tokens: int, hit: float) -> ExplainedChoice[Threads]:
    """Chooses the division with the shortest predicted step."""
    if len(tried) == 1:
        return ExplainedChoice(next(iter(tried)), "no other was tried")
    times = {threads: planner.step_ms(tokens, hit) for threads, planner in tried.items()}
    best, *others = sorted(times, key=lambda threads: times[threads])
    slower = ", ".join(f"{device} + {shadow}: {times[device, shadow]:.3f}" for device, shadow in others)
    why = f"device + shadow pool; {times[best]:.3f} ms a step at {hit:.0%} hits; {slower}"
    return ExplainedChoice(best, why)


def choose_slots(planner: Planner, split: ArenaSplit) -> ExplainedChoice[int]:
    """Chooses the number of slots with the least predicted time per token, for `split.sequences` sequences at their
    longest. More slots give more hits; fewer slots leave room for more sequences at once, so that all sequences are
    done in fewer turns."""

    def per_token(at_once: int) -> float:
        hit = split.hit(split.slots(at_once * split.longest))
        turns, rest = divmod(split.sequences, at_once)
        last = planner.step_ms(rest, hit) if rest else 0.0
        return (turns * planner.step_ms(at_once, hit) + last) / split.sequences

    most = min(split.sequences, split.frames // split.longest)
    if most < 1:
        return ExplainedChoice(0, "0: no room for one sequence")
    best = min(range(1, most + 1), key=per_token)
    slots = split.slots(best * split.longest)
    others = [f"{n}: {per_token(n):.3f}" for n in sorted({1, most} - {best})]
    why = f"{slots} of {split.experts}: {per_token(best):.3f} ms a token with {best} sequence(s) at once" + (
        f"; with {', '.join(others)}" if others else ""
    )
    return ExplainedChoice(slots, why)


def choose_swaps(planner: Planner, tokens: int, hit: float, interval: int) -> ExplainedChoice[int]:
    """Chooses as many copies as fit into a quarter of the time of an interval's steps, but at least 1."""
    time, copy = interval * planner.step_ms(tokens, hit), planner.costs.copy
    value = min(max(int(time / COPYING / max(copy, 1e-9)), 1), MOST_SWAPS)
    why = f"copies of {copy:.3f} ms may take 1 part in {COPYING} of {time:.3f} ms, {interval} step(s)"
    return ExplainedChoice(value, why + (f"; at most {MOST_SWAPS}" if value == MOST_SWAPS else ""))


def choose_streaming(planner: Planner, hit: float, decode: int, longest: int) -> ExplainedChoice[int]:
    """Chooses the smallest number of tokens, above `decode`, such that the device is to compute missing experts as well
    for every number of tokens from there to `longest`."""
    sizes = [decode + 1]
    while 2 * sizes[-1] < longest:
        sizes.append(1 << sizes[-1].bit_length())
    sizes = sorted({*sizes, longest})
    if longest <= decode:
        return ExplainedChoice(0, f"no prefill has more than {decode} tokens")
    least_tokens = 0
    for tokens in reversed(sizes):
        if planner.stream_ms(tokens, hit) >= GAIN * planner.layer_ms(tokens, hit):
            break
        least_tokens = tokens
    shown = least_tokens or longest
    how = "in place with the threads of both pools" if planner.costs.whole else "streamed"
    why = (
        f"a layer of {shown} tokens at {hit:.0%} hits takes {planner.stream_ms(shown, hit):.3f} ms {how}, "
        f"{planner.layer_ms(shown, hit):.3f} if not"
    )
    return ExplainedChoice(least_tokens, why)
