"""A checkpoint in GGUF files, whose tensors each have a type of their own."""

from collections import Counter
from types import MappingProxyType

import torch
from torch import Tensor

from executor.checkpoint.formats.ggml import KEPT, values_of
from executor.checkpoint.formats.scheme import Encoding, Fetch, Needed, Scheme, Stored
from models.gguf.folder import Index
from models.gguf.types import BY_NAME, FLOATS
from ops.format import Quantised, floats

PAIRS, APART = "gate_up_proj", ("gate_proj", "up_proj")  # all gates and ups, whose rows alternate, in two tensors here


class Blocks(Encoding):
    """One of ggml's quantised types."""

    zeros, signs = False, ("weight",)

    def __init__(self, kind: str):
        _, columns, nbytes = BY_NAME[kind]
        self.title, self.format, self.bits, self.group = kind, KEPT.get(kind), 8 * nbytes // columns, columns

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        return in_blocks(f"{module}.weight", (rows, columns), self.title)

    def stacked(self, module: str, experts: int, rows: int, columns: int) -> Stored:
        return in_blocks(module, (experts, rows, columns), self.title)


class GgufScheme(Scheme):
    def __init__(self, index: Index):
        self.index = index
        self.names = MappingProxyType({ours: view.tensor for ours, view in index.views.items()})
        sizes: Counter[str] = Counter()
        for info in index.tensors.values():
            sizes[info.kind] += info.nbytes
        self.title = f"GGUF: {', '.join(kind for kind, _ in sizes.most_common())}"
        self._blocks = {kind: Blocks(kind) for kind, _ in sizes.most_common() if kind not in FLOATS}
        self.encodings = tuple(self._blocks.values())

    def said(self, module: str) -> Encoding | None:
        kinds = {self._kind(name) for name in self._apart(module) or (f"{module}.weight", module)} - {None}
        return self._blocks.get(kinds.pop() or "") if len(kinds) == 1 else None

    def encoding(self, module: str) -> Encoding | None:
        return self.said(module)

    def contradicts(self, module: str) -> bool:
        """There is no config beside the files."""
        return False

    def weight(self, name: str, shape: tuple[int, ...], linear: bool) -> Stored | None:
        if apart := self._apart(name):
            half = shape[0], shape[1] // 2, *shape[2:]
            stored = _alternating(*(in_blocks(name, half, self._kind(name) or "") for name in apart))
        elif kind := self._kind(name):
            stored = in_blocks(name, shape, kind)
        else:
            return None
        return stored if linear else Stored(stored.tensors, lambda *part: floats(stored.read(*part)))

    def _kind(self, name: str) -> str | None:
        view = self.index.views.get(name)
        return self.index.tensors[view.tensor].kind if view else None

    def _apart(self, name: str) -> tuple[str, ...] | None:
        """The names of the tensors of gates and of ups, if the weight `name` has both."""
        found = tuple(name.replace(PAIRS, half) for half in APART)
        return found if PAIRS in name and all(half in self.index.views for half in found) else None


def in_blocks(name: str, shape: tuple[int, ...], kind: str) -> Stored:
    """A weight of any shape, each of whose rows is so many blocks."""
    block = BY_NAME[kind].columns

    def read(fetch: Fetch, *part: slice) -> Tensor | Quantised:
        columns = part[-1]
        first = columns.start // block * block
        values = values_of(kind, fetch(name, *part).flatten(0, -3))
        if isinstance(values, Quantised):
            if (first, columns.stop - first) == (columns.start, values.levels.shape[1]):
                return values
            values = values.floats()
        values = values[:, columns.start - first : columns.stop - first]
        return values.reshape([cut.stop - cut.start for cut in part])

    return Stored({name: Needed(shape, (kind,))}, read)


def _alternating(gates: Stored, ups: Stored) -> Stored:
    """A weight (experts, rows, ...), whose rows 0, 2, 4 ... are `gates` and 1, 3, 5 ... are `ups`."""

    def read(fetch: Fetch, one: slice, pairs: slice, *rest: slice) -> Tensor | Quantised:
        half = slice(pairs.start // 2, pairs.stop // 2)
        gate, up = (stored.read(fetch, one, half, *rest) for stored in (gates, ups))
        if isinstance(gate, Quantised) and isinstance(up, Quantised) and _alike(gate, up):
            levels = torch.stack([gate.plain_levels, up.plain_levels], 1).flatten(0, 1)
            scales = torch.stack([part.scales.view(torch.uint8) for part in (gate, up)], 1).flatten(0, 1)
            return Quantised(gate.bits, levels, scales.view(gate.scales.dtype), None)
        experts = one.stop - one.start
        gate, up = (floats(part).reshape(experts, half.stop - half.start, -1) for part in (gate, up))
        return torch.stack([gate, up], 2).reshape([cut.stop - cut.start for cut in (one, pairs, *rest)])

    return Stored(gates.tensors | ups.tensors, read)


def _alike(one: Quantised, other: Quantised) -> bool:
    return (one.bits, one.scales.dtype, one.group) == (other.bits, other.scales.dtype, other.group)
