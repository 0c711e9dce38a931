"""Simulates prefills on a device whose experts are in host memory. The ring and the split are those of a run
(cpu_offload/expert_ring.py); what the device's long steps give to streams here takes only time (streams.py):

    copies   groups of experts                           link to the device
    main     attention, ids | groups, residents | sums   device
    side     rows to the host, experts, rows back        links, CPU
    host     calls, and the order of a layer's rows once its ids are there
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbra.base.errors import UserError
from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.expert_ring import JOB_ROWS, ExpertRing, Link, group_count, group_size
from umbra.planner.machine import Hardware
from umbra.planner.served import Served
from umbra.planner.streams import CPU, DEVICE, LINK_IN, LINK_OUT, QueueTrace, Simulation
from umbra.planner.times import GIGA, TERA, US

CALL_S = 10e-6  # of the host for a call to the device, an assumption: eager ops
PLANES = 4  # of an expert, each copied by a call
GROUP_CALLS, LAYER_CALLS = 10, 40  # besides copies: products of a group; attention, routing and sums of a layer
SORT_S = 20e-9  # of the host for a (token, expert) pair: measured, 0.9 ms for 48,000 of them
TOKEN_BYTES = 2  # of an activation


@dataclass(frozen=True)
class CpuRates:
    """Seconds of the CPU for an expert, and for each of its pairs."""

    expert: float
    pair: float


def cpu_rates(model: Served, hardware: Hardware) -> CpuRates:
    """Returns the rates of kernels that read an expert once for all its pairs, while copies take the link's share of
    the host's memory bandwidth."""
    need, m = hardware.need, model.mixtures
    read = min(need("host.read_gbps"), need("host.memory_gbps") - need("host.copy_gbps"))
    if read <= 0:
        raise UserError(
            f"hardware {hardware.name}: host.memory_gbps: {need('host.memory_gbps'):g} must be above host.copy_gbps: "
            f"{need('host.copy_gbps'):g}"
        )
    return CpuRates(m.expert_bytes / (read * GIGA), 2 * m.macs / (need("host.tflops") * TERA))


class SimulatedLink(Link):
    def __init__(self, simulation: Simulation, groups: int, per_group: int, expert_s: float):
        super().__init__(groups, per_group)
        self.simulation, self.expert_s = simulation, expert_s
        self.copied, self.released = dict[int, int](), dict[int, int]()  # group -> number of the work
        self.waits: list[int] = []  # of the next work of the device

    def begin(self, group: int, layer: int, experts: Sequence[int]) -> None:
        calls = self.simulation.add("calls", "host", CALL_S * (PLANES * len(experts) + 2))
        after = [calls, *(self.released[group] for _ in range(group in self.released))]
        self.copied[group] = self.simulation.add("copies", "copies", self.expert_s * len(experts), LINK_IN, after)

    def ready(self, group: int) -> None:
        self.waits = [self.copied[group]]

    def release(self, group: int) -> None:
        self.released[group] = self.simulation.last["main"]

    def drain(self) -> None:
        self.simulation.add("drain", "host", after=[self.simulation.last["copies"]])


class SimulatedPrefill:
    """Prefills of one model by one ring, which learns from each."""

    def __init__(self, model: Served, hardware: Hardware, resident: float, cpu: CpuRates):
        self.model, self.hardware, self.cpu = model, hardware, cpu
        m, need = model.mixtures, hardware.need
        self.read = need("device.read_gbps") * need("device.read_fraction") * GIGA
        self.multiply = need("device.tflops") * need("device.multiply_fraction") * TERA
        self.unpack, self.rate = need("device.unpack_gbps") * GIGA, need("host.copy_gbps") * GIGA
        self.handover = need("host.handover_us") * US
        shadow, nothing = Line(1e3 * self.handover, 1e3 * cpu.expert, 1e3 * cpu.pair), Line(0.0, 0.0, 0.0)
        costs = Costs(0.0, nothing, shadow, 0.0, 1e3 * m.expert_bytes / self.rate, int(m.expert_bytes), (1, 1), 0.0)
        self.link = self._link(Simulation(), 0)
        self.ring = ExpertRing(self.link, m.layers, m.experts, m.top_k, costs)
        self.resident = np.tile(np.arange(m.experts) < round(resident * m.experts), (m.layers, 1))
        self.choose = np.random.default_rng(0)

    def _link(self, simulation: Simulation, tokens: int) -> SimulatedLink:
        m, size = self.model.mixtures, int(self.model.mixtures.expert_bytes)
        groups, per_group = group_count(tokens, size, m.experts), group_size(size, m.experts)
        return SimulatedLink(simulation, groups, per_group, m.expert_bytes / self.rate)

    def run(self, prompt: int, chunk: int) -> QueueTrace:
        """The prefill of a prompt whose tokens choose experts at random, in chunks of so many tokens."""
        m, simulation = self.model.mixtures, Simulation()
        self.ring.link = self.link = self._link(simulation, min(prompt, chunk))
        self.copied = 0
        for cached in range(0, prompt, chunk):
            tokens = min(chunk, prompt - cached)
            others = self.model.prefill(tokens, cached)[1] / m.layers
            simulation.add("before the step", "host", self.hardware.device.step_us * US)
            self.ring.begin(tokens, self.resident)
            for layer in range(m.layers):
                pairs = self.choose.multinomial(tokens * m.top_k, np.full(m.experts, 1 / m.experts))
                self._layer(simulation, layer, tokens, pairs, others)
            simulation.add("end of the step", "host", after=[simulation.last["main"]])
            self.ring.end()
            self.copied += int(self.ring.copied.sum())
        return simulation.run()

    def _layer(self, simulation: Simulation, layer: int, tokens: int, pairs: NDArray[np.int64], others: float) -> None:
        m, width, link = self.model.mixtures, self.model.hidden * TOKEN_BYTES, self.link
        row_s = width / self.read

        def device(what: str, seconds: float, calls: int, after: Sequence[int] = ()) -> int:
            number = simulation.add("calls", "host", CALL_S * calls)
            return simulation.add(what, "main", seconds, DEVICE, [number, *after])

        device("attention", others, LAYER_CALLS)
        steps = tokens * m.top_k * 4 / self.rate, SORT_S * tokens * m.top_k, 2 * tokens * m.top_k * row_s
        ids = simulation.add("ids", "main", steps[0], LINK_OUT)
        simulation.add("order of rows", "host", steps[1], after=[ids])
        computed = self.ring.plan(layer, pairs)
        sorted_rows = device("rows", steps[2], 2)
        self.ring.lead = 1e3 * (others + sum(steps))  # which events tell before the next layer
        rows = np.repeat(np.arange(len(computed)), pairs[computed])
        for start in range(0, len(rows), JOB_ROWS):
            job = rows[start : start + JOB_ROWS]
            sent = len(job) * width / self.rate
            calls = simulation.add("calls", "host", CALL_S * 5)
            simulation.add("rows to the host", "side", sent, LINK_OUT, [calls, sorted_rows])
            seconds = self.handover + len(np.unique(job)) * self.cpu.expert + len(job) * self.cpu.pair
            simulation.add("experts on the CPU", "side", seconds, CPU)
            simulation.add("rows back", "side", sent, LINK_IN)
        _, first_copied = self.ring.order(layer)

        def copied(most: int) -> None:
            for _, experts in self.ring.groups(layer, most):
                device("copied experts", self._products(pairs[experts]), GROUP_CALLS, link.waits)

        copied(first_copied)
        here = np.flatnonzero(self.resident[layer] & (pairs > 0))
        for first in range(0, len(here), link.per_group):
            group = here[first : first + link.per_group]
            gathered = 2 * len(group) * m.expert_bytes / self.read
            device("residents", gathered + self._products(pairs[group]), GROUP_CALLS)
        copied(m.experts)
        device("sums", tokens * m.top_k * row_s, 1, [simulation.last["side"]] if computed else [])

    def _products(self, pairs: NDArray[np.int64]) -> float:
        """Seconds of the device for a group of experts with so many pairs."""
        m = self.model.mixtures
        unpacked = (pairs > 0).sum() * m.expert_bytes / self.unpack
        return float(unpacked + 2 * pairs.sum() * m.macs / self.multiply)
