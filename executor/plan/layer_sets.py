"""Divides a model's attention layers into sets. The layers of a set see as many tokens, and keep them in pages with the
same numbers: a sequence has a block table for each set. All sets have as many layers, up to padding, and layers at the
same place in their sets share a cache, so that a page of any set is the same memory and one pool serves all of them.

Layers that see a window of tokens need the pages of that window only; those behind it are free for other sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSet:
    window: int | None  # tokens, up to itself, that a token sees; None: all
    layers: tuple[int, ...]  # numbers of the layers, in order


def layer_sets(windows: Sequence[int | None]) -> tuple[LayerSet, ...]:
    """The sets of layers that see windows[i] tokens each: those that see all come first. Their size is the one with
    which they have the fewest empty places."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    counts = [len(layers) for _, layers in ordered]
    size = min(sorted(set(counts), reverse=True), key=lambda size: sum(-(-count // size) * size for count in counts))
    return tuple(
        LayerSet(window, tuple(layers[first : first + size]))
        for window, layers in ordered
        for first in range(0, len(layers), size)
    )
