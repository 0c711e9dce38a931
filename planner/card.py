"""What one device and its host do with a model whose experts do not all fit on the device.

decode    as of a layout: the host computes the experts that are missed, beside those on the device
prefill   a run's own ring of experts with a clock (planner/ring_clock.py), and at least the missing experts' bytes
          over host.memory_gbps, whether they are copied or read by the host's kernels
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from cpu_offload.costs import Costs, Line
from cpu_offload.expert_ring import GROUPS, group_size
from cpu_offload.planner.hits import curve_of, hit_rate
from executor.config.units import GB
from planner.cluster import Load
from planner.machine import Hardware
from planner.ring_clock import Sides, clocked
from planner.served import Served
from planner.times import GIGA, TERA, US


@dataclass(frozen=True)
class Decoded:
    """Decode steps of so many sequences at once."""

    sequences: int
    resident: float  # share of the experts
    hit: float
    rate: float  # tokens a second, of all sequences


def resident_share(model: Served, hardware: Hardware, sequences: int, tokens: int, guesses: int = 0) -> float | None:
    """The share of the experts that fits on the device beside so many sequences; None: these do not fit."""
    m = model.mixtures
    room = (hardware.need("device.memory_gb") - hardware.device.reserved_gb) * GB
    left = room - model.rest_bytes(sequences, tokens, guesses)
    if left >= m.nbytes:
        return 1.0
    left -= GROUPS * group_size(int(m.expert_bytes), m.experts) * m.expert_bytes
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


def prefill(model: Served, hardware: Hardware, prompt: int, chunk: int, resident: float) -> Sides:
    """The prefill of one prompt in chunks whose tokens choose experts at random."""
    total, cached = Sides(), 0
    while cached < prompt:
        tokens = min(chunk, prompt - cached)
        total += _chunk(model, hardware, tokens, cached, resident)
        cached += tokens
    return total


def _chunk(model: Served, hardware: Hardware, tokens: int, cached: int, resident: float) -> Sides:
    m, need = model.mixtures, hardware.need
    mixtures, others = model.prefill(tokens, cached)
    even = np.full(m.experts, 1 / m.experts)
    pairs = np.random.default_rng(0).multinomial(tokens * m.top_k, even, m.layers)
    here = np.tile(np.arange(m.experts) < round(resident * m.experts), (m.layers, 1))
    reading, product = m.expert_bytes / (need("host.read_gbps") * GIGA), 2 * m.macs / (need("host.tflops") * TERA)
    costs = Costs(
        base=0.0, device=Line(0.0, mixtures / int((pairs > 0).sum()), 0.0),
        shadow=Line(US * need("host.handover_us"), reading, product), slip=0.0,
        copy=m.expert_bytes / (need("host.copy_gbps") * GIGA), block_bytes=0, threads=(0, 0), seconds=0.0,
    )  # fmt: skip
    found = clocked(pairs, here, costs, int(m.expert_bytes), others / m.layers)
    missing = int((pairs[~here] > 0).sum()) * m.expert_bytes / (need("host.memory_gbps") * GIGA)
    return dataclasses.replace(found, total=max(found.total, missing) + hardware.device.step_us * US)
