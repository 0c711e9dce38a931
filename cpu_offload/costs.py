"""The measured costs of a layer with shadow experts, and the time of a layer whose work is divided. Milliseconds."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ms = TypeVar("Ms", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class Line:
    """The time of one side of a layer: fixed + expert * experts + pair * pairs."""

    fixed: float
    expert: float
    pair: float

    def ms(self, experts: Ms, pairs: Ms, any_used: Ms | float = 1.0) -> Ms:
        """Milliseconds for `experts` experts and `pairs` pairs; `any_used` is the probability that there are any."""
        milliseconds: Ms = self.fixed * any_used + self.expert * experts + self.pair * pairs
        return milliseconds


@dataclass(frozen=True)
class Costs:
    """Measured costs, in milliseconds."""

    base: float
    device: Line  # costs of resident experts, without `base`
    shadow: Line
    slip: float  # 0..1
    copy: float  # time to copy one expert
    block_bytes: int  # bytes of one expert
    threads: tuple[int, int]  # threads of the device and of the shadow pool
    seconds: float  # time that all measurements took, in seconds
    # Costs of all experts where the device reads those in host memory in place, with the threads of both pools; None:
    # it has to copy them.
    whole: Line | None = None

    def layer_ms(self, device: Ms, shadow: Ms, link: Ms) -> Ms:
        """The time of a layer whose sides take so long each: the longest, and what it does not hide of the others."""
        longest: Any = np.maximum(np.maximum(device, shadow), link)
        milliseconds: Ms = self.base + longest + self.slip * (device + shadow + link - longest)
        return milliseconds
