"""The work that a device does in a step beside what its tensors' shapes say, for predictions of times."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.models.config import ModelConfig
from umbra.models.registry import load
from umbra.ops.counted import CountedOps, OpCosts


@dataclass(frozen=True)
class Counting:
    costs: Callable[[CountedOps], OpCosts]  # what the device's ops take beyond their specs
    exchanged: int  # rows of the largest step whose experts' rows are exchanged; 0: rows are always gathered


def counting_of(case: Case, config: ModelConfig) -> Counting:
    """Returns the way in which the case's device computes the steps of a model with this config."""
    if where := PLATFORMS[case.platform].counting:
        counting: Counting = load(where)(case, config)
        return counting
    return Counting(OpCosts, sys.maxsize if case.parallel_sizes.expert_slots else 0)
