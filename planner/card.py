"""Times of one device and its host with a model whose experts do not all fit on the device.

*Decode* steps are as of a layout: the host computes the experts that are missed, beside those on the device. *Prefills*
go through a run's own ring of experts, on simulated streams (planner/streamed_prefill.py).
"""

from dataclasses import dataclass

from umbra.cpu_offload.expert_ring import group_count, group_size
from umbra.cpu_offload.planner.hits import curve_of, hit_rate
from umbra.executor.config.units import GB
from umbra.planner.cluster import Load
from umbra.planner.machine import Hardware
from umbra.planner.served import Served
from umbra.planner.streamed_prefill import SimulatedPrefill, cpu_rates
from umbra.planner.streams import DEVICE, QueueTrace, Simulation


@dataclass(frozen=True)
class Decoded:
    """Decode steps of so many sequences at once."""

    sequences: int
    resident: float  # share of the experts
    hit: float
    rate: float  # tokens a second, of all sequences


def resident_share(model: Served, hardware: Hardware, sequences: int, tokens: int, guesses: int = 0) -> float | None:
    """The share of the experts that fits on the device beside so many sequences and the ring for prompts of so many
    tokens in one chunk; None: these do not fit."""
    m = model.mixtures
    size = int(m.expert_bytes)
    room = (hardware.need("device.memory_gb") - hardware.device.reserved_gb) * GB
    left = room - model.rest_bytes(sequences, tokens, guesses)
    if left >= m.nbytes:
        return 1.0
    left -= group_count(tokens, size, m.experts) * group_size(size, m.experts) * m.expert_bytes
    return left / m.nbytes if left >= 0 else None


def decoded(
    model: Served, load: Load, hardware: Hardware, curve: str, sequences: int, accepted: float | None = None
) -> Decoded | None:
    """With `accepted`, each step checks a guess of each sequence, which is right that often. None: it does not fit."""
    guesses = int(accepted is not None)
    resident = resident_share(model, hardware, sequences, load.prompt_tokens + load.output_tokens, guesses)
    if resident is None:
        return None
    hit, cached = hit_rate(curve_of(curve, "card.curves"), resident), load.prompt_tokens + load.output_tokens // 2
    tokens = sequences * (1 + (accepted or 0.0))
    return Decoded(sequences, resident, hit, tokens / model.decode(sequences, cached, hit, guesses))


def prefill(model: Served, hardware: Hardware, prompt: int, chunk: int, resident: float) -> QueueTrace:
    """The prefill of one prompt, in chunks, whose tokens choose experts at random."""
    if resident < 1:
        return SimulatedPrefill(model, hardware, resident, cpu_rates(model, hardware)).run(prompt, chunk)
    simulation = Simulation()
    for cached in range(0, prompt, chunk):
        simulation.add("chunk", "main", sum(model.prefill(min(chunk, prompt - cached), cached)), DEVICE)
    return simulation.run()
