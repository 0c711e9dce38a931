"""What one device and its host do with a model whose experts do not all fit on the device.

    decode    as of a layout: the host computes the experts that are missed, beside those on the device
    prefill   a layer takes the longest of
                link     copied experts * bytes / host.copy_gbps
                device   its own work, and the longer of all mixtures and of the host's part, which it waits for
                memory   missing experts * bytes / host.memory_gbps, whether copied or read by the host's kernels

x of a layer's m missing experts are copied, the others computed by the host. An expert takes the host c: reading its
weights, and the products of its pairs. x is where link and device end together, x * copy = other + (m - x) * c: then
copies for later layers go on while the device computes what is no mixture, which needs AHEAD tokens, since only then
it is certain before the routing that nearly all experts are used.
"""

import dataclasses
from dataclasses import dataclass

from executor.config.units import GB
from planner.cluster import Load
from planner.hits import hit_rate
from planner.machine import Hardware
from planner.served import Served
from planner.times import GIGA, TERA, US

AHEAD = 128  # tokens of a prompt from which on copies run ahead of the routing
RING = 32  # experts in the ring through which they are copied: four groups of 8


@dataclass(frozen=True)
class Decoded:
    """Decode steps of so many sequences at once."""

    sequences: int
    resident: float  # share of the experts
    hit: float
    rate: float  # tokens a second, of all sequences


@dataclass(frozen=True)
class Prefill:
    """Seconds of a prompt, and those of each side."""

    total: float = 0.0
    link: float = 0.0
    device: float = 0.0
    host: float = 0.0

    @property
    def longest(self) -> str:
        return max(("device", "link", "host"), key=lambda side: float(getattr(self, side)))

    def __add__(self, other: "Prefill") -> "Prefill":
        return Prefill(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def resident_share(model: Served, hardware: Hardware, sequences: int, tokens: int, guesses: int = 0) -> float | None:
    """The share of the experts that fits on the device beside so many sequences; None: these do not fit."""
    m = model.mixtures
    room = (hardware.need("device.memory_gb") - hardware.device.reserved_gb) * GB
    left = room - model.rest_bytes(sequences, tokens, guesses)
    if left >= m.nbytes:
        return 1.0
    left -= RING * m.expert_bytes
    return left / m.nbytes if left >= 0 else None


def decoded(
    model: Served, load: Load, hardware: Hardware, curve: str, sequences: int, accepted: float | None = None
) -> Decoded | None:
    """With `accepted`, each step checks a guess of each sequence, which is right that often. None: it does not fit."""
    guesses = int(accepted is not None)
    resident = resident_share(model, hardware, sequences, load.prompt_tokens + load.output_tokens, guesses)
    if resident is None:
        return None
    hit, cached = hit_rate(curve, resident), load.prompt_tokens + load.output_tokens // 2
    tokens = sequences * (1 + (accepted or 0.0))
    return Decoded(sequences, resident, hit, tokens / model.decode(sequences, cached, hit, guesses))


def prefill(model: Served, hardware: Hardware, prompt: int, chunk: int, resident: float) -> Prefill:
    """The prefill of one prompt in chunks, if prompts use experts evenly."""
    total, cached = Prefill(), 0
    while cached < prompt:
        tokens = min(chunk, prompt - cached)
        total += _chunk(model, hardware, tokens, cached, resident)
        cached += tokens
    return total


def _chunk(model: Served, hardware: Hardware, tokens: int, cached: int, resident: float) -> Prefill:
    m, need = model.mixtures, hardware.need
    mixture, other = (seconds / m.layers for seconds in model.prefill(tokens, cached))
    step = hardware.device.step_us * US
    missing = (1 - resident) * m.used(tokens)
    if not missing:
        return Prefill(step + m.layers * (mixture + other), 0.0, m.layers * (mixture + other), 0.0)
    copy = m.expert_bytes / (need("host.copy_gbps") * GIGA)
    reading, pair = m.expert_bytes / (need("host.read_gbps") * GIGA), 2 * m.macs / (need("host.tflops") * TERA)
    expert = reading + pair * tokens * m.top_k * (1 - resident) / missing
    ahead = other if tokens >= AHEAD else 0.0
    copied = min(missing, (missing * expert + ahead) / (expert + copy))
    link, host = copied * copy, (missing - copied) * expert
    host += US * need("host.handover_us") * (copied < missing)
    floor = missing * m.expert_bytes / (need("host.memory_gbps") * GIGA)
    device = other + max(mixture, host)
    layer = max(link, floor, device) if ahead else other + max(link, floor, mixture, host)
    return Prefill(step + m.layers * layer, m.layers * link, m.layers * (mixture + other), m.layers * host)
