"""Shadow experts without weights: what is decided about their memory, and what is counted of them."""

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from umbra.cpu_offload.costs import Line
from umbra.cpu_offload.device import ShadowDevice
from umbra.cpu_offload.history import StepRecord
from umbra.cpu_offload.planner.choices import Choices
from umbra.cpu_offload.policy.residency import Swap
from umbra.executor.platform.cpu.device import CpuPlatform
from umbra.executor.platform.cpu.shadow_device import CpuDevice


@dataclass
class FakeShadowExperts:
    """Stands for `ShadowExperts` of two layers with four experts. `in_slot` says which of them are resident, `lasting`
    how often each is used in an interval, and `steps` what decode steps have recorded."""

    in_slot: np.ndarray[Any, np.dtype[np.bool_]]
    lasting: list[float]
    interval: int = 2
    extent_slots: int = 3
    extent_frames: int = 5
    steps: list[StepRecord] = field(default_factory=list)

    # Its parts, as far as they are asked for these numbers.
    @property
    def arena(self) -> "FakeShadowExperts":
        return self

    @property
    def settings(self) -> "FakeShadowExperts":
        return self

    @property
    def history(self) -> "FakeShadowExperts":
        return self

    @property
    def residency(self) -> "FakeForecasts":
        return FakeForecasts(FakeForecast(np.array(self.lasting)))

    def forget(self) -> None:
        self.steps = []


@dataclass
class FakeForecast:
    """The uses that are expected of each expert."""

    lasting: np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class FakeForecasts:
    """Stands for a `Residency` that only forecasts."""

    forecast: FakeForecast


def any_swaps(resident: np.ndarray[Any, np.dtype[np.bool_]], free_slots: int, under_way: int = 0) -> list[Swap]:
    """Stands for `Residency.swaps`: a random expert that is not resident comes, for another or into a free slot."""
    coming, leaving = (np.argwhere(which).tolist() for which in (~resident, resident))
    if not coming or not (leaving or free_slots):
        return []
    layer, expert = random.choice(coming)
    if free_slots:
        return [Swap(layer, expert, None)]
    other_layer, other = random.choice(leaving)
    return [Swap(layer, expert, (other_layer, other))]


class CopyingPlatform(CpuPlatform):
    """Its device takes no time and copies experts for long steps, as if the shadow pool were on other NUMA nodes."""

    device_class: ClassVar[type[CpuDevice]] = CpuDevice

    def shadow_device(self, top_k: int, choices: Choices) -> ShadowDevice:
        costs = dataclasses.replace(choices.costs, whole=None, copy=0.0, device=Line(0.0, 0.0, 0.0))
        return self.device_class(self.decode_rows, top_k, choices.stream_tokens.value, costs)
