"""Divides the missing experts of a layer in a step of many tokens, so that link, device and CPU end together: those of
most tokens are copied to the device, the shadow pool computes the others.

    link    copies, the experts of most tokens first        copy * copied
    device  residents and copied experts                    a line of experts and pairs
    CPU     the other experts, which have few tokens        another line

A copy costs as much for one token as for a thousand, so of any two experts the one with more tokens is copied. The
number of copies is the one with the shortest time, `Costs.layer_ms`. Residents never move.

Device and CPU begin once the routing is known. The link began before that, as far as the ring had room."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbra.cpu_offload.costs import Costs

Pairs = npt.NDArray[np.integer | np.floating]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PrefillSplit:
    copied: list[int]  # experts to copy, in this order: that of their numbers of pairs
    computed: list[int]  # experts that the shadow pool computes
    ms: float  # predicted, from when the routing is known


def split(pairs: Pairs, here: Bools, costs: Costs, per_group: int, begun: int = 0, lead: float = 0.0) -> PrefillSplit:
    """Divides the experts of a layer with so many (token, expert) `pairs` of each. Experts that are `here`, on the
    device or on their way to it, are computed there. Copied ones are computed by groups of `per_group`; experts without
    pairs are left out. The link makes `begun` copies for the layer anyway, and has had `lead` milliseconds for them."""
    used = pairs > 0
    missing = np.flatnonzero(used & ~here)
    missing = missing[np.argsort(-pairs[missing], kind="stable")]
    present = np.flatnonzero(used & here)
    before = np.cumsum([0, *pairs[missing]], dtype=np.float64)  # pairs of the first n missing ones
    copied = np.arange(len(before), dtype=np.float64)
    left = len(missing) - copied
    groups = (len(present) > 0) + np.ceil(copied / per_group)
    device = costs.device.ms(len(present) + copied, pairs[present].sum() + before, groups)
    shadow = costs.shadow.ms(left, before[-1] - before, np.minimum(left, 1.0))
    link = np.maximum(costs.copy * (begun + copied) - lead, costs.copy * copied)
    ms = costs.layer_ms(device, shadow, link)
    best = int(ms.argmin())
    return PrefillSplit(missing[:best].tolist(), missing[best:].tolist(), float(ms[best]))
