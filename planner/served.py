"""A model that one device serves beside its host, as `planner/card.py` asks about it: a case, whose steps are counted,
or a file in planner/models/ with the numbers of a model that no family here computes.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.cpu_offload.planner.model import ExpertsShape
from umbra.executor.config.load import read_yaml
from umbra.executor.config.schema import key, leaves, read
from umbra.ops.counted import Done
from umbra.planner.cluster import DOCS, Cluster, Guesses
from umbra.planner.layouts import Sizes, case_of, spans_of
from umbra.planner.machine import Hardware
from umbra.planner.times import GIGA, TERA, US, Placing, step_times
from umbra.planner.work import CountedRank, RankWork

FOLDER = ROOT / "planner" / "models"
ALONE = Sizes(1, 1, 1, 1, "q4", 0.0)


@dataclass(frozen=True)
class Mixtures:
    """The layers of a model that have experts, all alike."""

    layers: int
    experts: int
    top_k: int
    expert_bytes: float  # on the device and on the host
    macs: float  # multiply-adds of a (token, expert) pair

    @property
    def nbytes(self) -> float:
        return self.layers * self.experts * self.expert_bytes

    def used(self, tokens: float) -> float:
        """The experts of a layer that so many tokens use, if all are used equally often."""
        return ExpertsShape(self.layers, self.experts, self.top_k).used(tokens)


class Served(Protocol):
    name: str
    mixtures: Mixtures
    hidden: int  # width of a row

    @property
    def guesses(self) -> bool:
        """Says whether the model has a layer for multi-token prediction."""

    def rest_bytes(self, sequences: int, tokens: int, guesses: int) -> float:
        """Returns the bytes that the device holds besides its experts, for `sequences` of `tokens` tokens each."""

    def decode(self, sequences: int, cached: int, hit: float, guesses: int) -> float:
        """Seconds of a decode step."""

    def prefill(self, tokens: int, cached: int) -> tuple[float, float]:
        """Seconds in which the device computes all mixtures of a prompt's tokens, and everything else."""


class CountedModel:
    """A case's model in 4 bits."""

    def __init__(self, name: str, cluster: Cluster, hardware: Hardware):
        self.name, self.hardware = name, hardware
        self.cluster = dataclasses.replace(cluster, case=name, guesses=Guesses())
        case = case_of(self.cluster, ALONE)
        if case.platform != hardware.platform:
            raise UserError(f"card.models: case {name} runs on {case.platform}, {hardware.name} is {hardware.platform}")
        self.counted = CountedRank(case)
        config, layers = self.counted.config, self.counted.expert_layers
        if not layers:
            raise UserError(f"card.models: case {name}: a dense model has no experts for a card and its host to share")
        expert_bytes = self.counted.memory.experts / (layers * config.expert_count)
        macs = next(one.macs for one in self.counted.decode(1, 1).done if one.mixture) / config.experts_per_token
        self.hidden = config.hidden_size
        self.mixtures = Mixtures(layers, config.expert_count, config.experts_per_token, expert_bytes, macs)

    @cached_property
    def guessing(self) -> CountedRank | None:
        """The same model with the layer that guesses tokens; None: it has none."""
        try:
            return CountedRank(case_of(dataclasses.replace(self.cluster, guesses=Guesses((1.0,))), ALONE))
        except UserError:
            return None

    @property
    def guesses(self) -> bool:
        return self.guessing is not None

    def _counted(self, guesses: int) -> CountedRank:
        return self.guessing if guesses and self.guessing else self.counted

    def rest_bytes(self, sequences: int, tokens: int, guesses: int) -> float:
        counted = self._counted(guesses)
        return counted.memory.rest + sequences * counted.limits.pages_of(tokens) * counted.memory.page

    def decode(self, sequences: int, cached: int, hit: float, guesses: int) -> float:
        return self._seconds(self._counted(guesses).decode(sequences, cached, guesses), hit)

    def prefill(self, tokens: int, cached: int) -> tuple[float, float]:
        work = self.counted.prefill(tokens, cached)

        def seconds(done: Iterable[Done]) -> float:
            return self._seconds(RankWork(tuple(done), work.messages)) - self.hardware.device.step_us * US

        return seconds(one for one in work.done if one.mixture), seconds(one for one in work.done if not one.mixture)

    def _seconds(self, work: RankWork, hit: float = 1.0) -> float:
        return step_times(work, Placing(spans_of(1, 1), hit), self.hardware).total


@dataclass(frozen=True)
class ServedNumbers:
    description: str = key("", "one line")
    layers: int = key(0, "layers with experts", minimum=1)
    experts: int = key(0, "experts of a layer", minimum=1)
    top_k: int = key(0, "experts of a token", minimum=1)
    hidden: int = key(0, "width of a row", minimum=1)
    inner: int = key(0, "width inside an expert", minimum=1)
    expert_mb: float = key(0.0, "million bytes of an expert", minimum=1e-6)
    rest_gb: float = key(0.0, "thousand million bytes of all other weights", minimum=0)
    active_billions: float = key(0.0, "weights that a token is multiplied by, in thousand millions", minimum=1e-6)
    kv_kb: float = key(0.0, "thousand bytes of cache for a token", minimum=0)
    decode_ms: float = key(0.0, "the device's part of a decode step", minimum=1e-6)
    beside_ms: float = key(0.0, "the part of it in which the host computes experts without delaying it", minimum=0)
    guess_ms: float | None = key(
        None, "what a draft adds to it besides its rows' experts; null: there is no speculative decoding", minimum=0
    )


class NumberedModel:
    """A model of planner/models/."""

    def __init__(self, name: str, numbers: ServedNumbers, hardware: Hardware):
        self.name, self.numbers, self.hardware, self.hidden = name, numbers, hardware, numbers.hidden
        macs = 3.0 * numbers.hidden * numbers.inner
        self.mixtures = Mixtures(numbers.layers, numbers.experts, numbers.top_k, numbers.expert_mb * 1e6, macs)

    @property
    def guesses(self) -> bool:
        return self.numbers.guess_ms is not None

    def rest_bytes(self, sequences: int, tokens: int, guesses: int) -> float:
        own = guesses * self.mixtures.experts * self.mixtures.expert_bytes  # of the layer that guesses
        return self.numbers.rest_gb * 1e9 + own + sequences * tokens * self.numbers.kv_kb * 1e3

    def decode(self, sequences: int, cached: int, hit: float, guesses: int) -> float:
        m, numbers = self.mixtures, self.numbers
        missing = m.layers * (1 - hit) * m.used(sequences * (1 + guesses))
        on_host = missing * m.expert_bytes / (self.hardware.need("host.read_gbps") * GIGA)
        device = numbers.decode_ms + guesses * (numbers.guess_ms or 0.0)
        return device / 1e3 + max(0.0, on_host - numbers.beside_ms / 1e3)

    def prefill(self, tokens: int, cached: int) -> tuple[float, float]:
        m, need = self.mixtures, self.hardware.need
        rate = need("device.tflops") * need("device.multiply_fraction") * TERA
        pairs = tokens * m.layers * m.top_k * m.macs
        unpacked = m.layers * m.used(tokens) * m.expert_bytes / (need("device.unpack_gbps") * GIGA)
        others = tokens * self.numbers.active_billions * 1e9 - pairs
        return max(2 * pairs / rate, unpacked), 2 * others / rate


def named(name: str, hardware: Hardware) -> NumberedModel:
    """The model of that name in planner/models/."""
    path = FOLDER / f"{name}.yaml"
    numbers = read(ServedNumbers, read_yaml(path, "a model"), path.name, DOCS)
    for leaf in leaves(ServedNumbers):
        if leaf.minimum and leaf.default is not None and not getattr(numbers, leaf.name):
            raise UserError(f"{path.name}: {leaf.name} is missing: {DOCS} has every key")
    if numbers.top_k > numbers.experts:
        raise UserError(f"{path.name}: top_k: {numbers.top_k} must be at most experts: {numbers.experts}")
    return NumberedModel(name, numbers, hardware)


def served(name: str, cluster: Cluster, hardware: Hardware) -> Served:
    """The model of that name in planner/models/, or of the case of that name."""
    if (FOLDER / f"{name}.yaml").is_file():
        return named(name, hardware)
    return CountedModel(name, cluster, hardware)
