"""A checkpoint in GGUF files, whose tensors each have a type of their own."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from types import MappingProxyType

import torch
from torch import Tensor

from umbra.executor.checkpoint.formats.ggml import KEPT, values_of
from umbra.executor.checkpoint.formats.scheme import Encoding, Fetch, Needed, Scheme, Stored
from umbra.models.gguf.container import TensorInfo
from umbra.models.gguf.folder import Index
from umbra.models.gguf.names import FACTOR, Paired, Tiled
from umbra.models.gguf.types import BY_NAME, FLOATS, TYPES
from umbra.ops.formats import FORMATS, Format
from umbra.ops.formats.ggml import Blocks, Undecoded
from umbra.ops.formats.nvfp4 import NVFP4
from umbra.ops.formats.quantised import Nested, Quantised, floats
from umbra.ops.formats.rows import Alternating

BLOCK = 32  # columns that parts of blocks are multiples of
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "minus_one": lambda norm: norm.float() - 1,
    "logarithm": lambda rates: (-rates.float()).log(),
}
PAIRS, APART = "gate_up_proj", ("gate_proj", "up_proj")  # all gates and ups, whose rows alternate, in two tensors here


class InBlocks(Encoding):
    """One of ggml's quantised types."""

    zeros, signs = False, ("weight",)

    def __init__(self, kind: str, unit: int = 0):
        """`unit`: so many columns at most stay together."""
        type = BY_NAME[kind]
        self.title, self.bits, self.group = kind, 8 * type.nbytes // type.columns, type.columns
        self.format = replace(KEPT[kind], group=gcd(KEPT[kind].group, unit))

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
        self._blocks = {kind: InBlocks(kind) for kind, _ in sizes.most_common() if kind not in FLOATS}
        self.encodings = tuple(self._blocks.values())

    def said(self, *spellings: str) -> Encoding | None:
        module = spellings[0]
        if split := self._split(f"{module}.weight"):
            return next((self._blocks[info.kind] for _, info in split if info.kind in self._blocks), None)
        kinds = {self._kind(name) for name in self._apart(module) or (f"{module}.weight", module)} - {None}
        encoding = self._blocks.get(kinds.pop() or "") if len(kinds) == 1 else None
        if encoding and (heads := self._heads(f"{module}.weight")):
            divided = heads.size % BLOCK == 0 and not KEPT[encoding.title].spec.record
            return InBlocks(encoding.title, heads.size) if divided else None
        return encoding

    def encoding(self, module: str) -> Encoding | None:
        return self.said(module)

    def table(self, module: str) -> Format | None:
        encoding = self.said(module)
        return encoding.format if encoding else None

    def contradicts(self, module: str) -> bool:
        """There is no config beside the files."""
        return False

    def weight(self, name: str, shape: tuple[int, ...], linear: bool) -> Stored | None:
        if apart := self._apart(name):
            gate, up = (self._kind(half) or "" for half in apart)
            return alternating(*apart, shape, (gate, up), linear)
        if split := self._split(name):
            return keys_and_values(split, shape)
        if not (kind := self._kind(name)):
            return None
        if change := CHANGES.get(self.index.views[name].change):
            need = Needed(shape, (kind,))
            return Stored({name: need}, lambda fetch, *part: change(floats_of(name, kind, fetch, *part)))
        if heads := self._heads(name):
            return Stored({name: Needed(shape, (kind,))}, partial(of_heads, heads, name, kind))
        stored = in_blocks(name, shape, kind)
        table = len(shape) == 2 and name.endswith(".weight")
        return stored if linear or table else Stored(stored.tensors, partial(floats_of, name, kind))

    def _kind(self, name: str) -> str | None:
        view = self.index.views.get(name)
        return self.index.tensors[view.tensor].kind if view else None

    def _heads(self, name: str) -> Tiled | Paired | None:
        """The order of the weight's columns, if that divides blocks."""
        view = self.index.views.get(name)
        heads = view.columns if view else None
        return heads if view and heads and heads.size % BY_NAME[self._kind(name) or ""].columns else None

    def _split(self, name: str) -> list[tuple[str, TensorInfo]] | None:
        """The tensors of heads' keys and of their values, if the weight `name` has both."""
        halves = [name.replace("kv_b_proj", which) for which in ("k_b_proj", "v_b_proj")]
        if name in halves or not all(half in self.index.views for half in halves):
            return None
        return [(half, self.index.tensors[self.index.views[half].tensor]) for half in halves]

    def _apart(self, name: str) -> tuple[str, str] | None:
        """The names of the tensors of gates and of ups, if the weight `name` has both."""
        halves = name.replace(PAIRS, APART[0]), name.replace(PAIRS, APART[1])
        return halves if PAIRS in name and all(half in self.index.views for half in halves) else None


def in_blocks(name: str, shape: tuple[int, ...], kind: str) -> Stored:
    """A weight of any shape, each of whose rows is so many blocks."""
    needed = {name: Needed(shape, (kind,))}
    if KEPT.get(kind) == FORMATS[NVFP4.name]:
        needed[factor_of(name)] = Needed(shape[:-2] or (1,), ("F32",), optional=True)
    return Stored(needed, partial(part_of, name, kind))


def factor_of(name: str) -> str:
    """The name of the number that all of a weight is multiplied by."""
    return name.removesuffix(".weight") + FACTOR


def part_of(name: str, kind: str, fetch: Fetch, *part: slice) -> Tensor | Quantised:
    columns, block = part[-1], BY_NAME[kind].columns
    start = columns.start // block * block
    first, end = columns.start - start, columns.stop - start
    data = fetch(name, *part).flatten(0, -3)
    factor = 1.0
    if (own := factor_of(name)) in fetch:
        factor = floats_of(own, "F32", fetch, part[0] if part[2:] else slice(0, 1)).item()
    decode = partial(values_of, kind, factor=factor)
    if kind not in FLOATS and first % BLOCK == end % BLOCK == 0:
        return Blocks(Undecoded(NUMBERS[kind], data, first, end - first, KEPT.get(kind), decode, factor))
    return floats(decode(data))[:, first:end].reshape([cut.stop - cut.start for cut in part])


def of_heads(heads: Tiled | Paired, name: str, kind: str, fetch: Fetch, *part: slice) -> Tensor | Quantised:
    """A part of a matrix whose value heads are columns and end within blocks."""
    rows, columns = part
    unit = gcd(heads.size, columns.start, columns.stop)
    numbers = heads.order(unit)[columns.start // unit : columns.stop // unit]
    values = values_of(kind, fetch(name, rows, columns))
    if isinstance(values, Nested) and unit % BLOCK == 0:
        return values.units(numbers, unit)
    return floats(values).unflatten(1, (-1, unit))[:, numbers].flatten(1)


def floats_of(name: str, kind: str, fetch: Fetch, *part: slice) -> Tensor:
    return floats(part_of(name, kind, fetch, *part)).reshape([cut.stop - cut.start for cut in part])


def keys_and_values(names: Sequence[tuple[str, TensorInfo]], shape: tuple[int, ...]) -> Stored:
    """A matrix with the key rows and value rows of each head in turn, stored as (heads, columns, key rows) and (heads,
    value rows, columns)."""
    (k, of_keys), (v, of_values) = names
    rows, columns = shape
    heads, key = of_keys.shape[0], of_keys.shape[-1]
    per_head = rows // heads if rows % heads == 0 else 0
    needed = in_blocks(k, (heads, columns, key), of_keys.kind).tensors
    needed |= in_blocks(v, (heads, per_head - key, columns), of_values.kind).tensors

    def read(fetch: Fetch, part: slice, columns: slice) -> Tensor:
        whole = slice(part.start // per_head, -(-part.stop // per_head))
        own = floats_of(k, of_keys.kind, fetch, whole, columns, slice(0, key)).mT
        joined = torch.cat([own, floats_of(v, of_values.kind, fetch, whole, slice(0, per_head - key), columns)], 1)
        return joined.flatten(0, 1)[part.start - whole.start * per_head : part.stop - whole.start * per_head]

    return Stored(needed, read)


def alternating(gates: str, ups: str, shape: tuple[int, ...], kinds: tuple[str, str], linear: bool) -> Stored:
    """A weight (experts, rows, ...), whose rows 0, 2, 4 ... are the tensor `gates` and 1, 3, 5 ... are `ups`."""

    def read(fetch: Fetch, one: slice, pairs: slice, *rest: slice) -> Alternating:
        half = slice(pairs.start // 2, pairs.stop // 2)
        read_one = part_of if linear else floats_of
        even, odd = (read_one(*named, fetch, one, half, *rest) for named in zip((gates, ups), kinds, strict=True))
        return Alternating(even, odd)

    half = shape[0], shape[1] // 2, *shape[2:]
    stored = (in_blocks(name, half, kind) for name, kind in zip((gates, ups), kinds, strict=True))
    return Stored({name: need for one in stored for name, need in one.tensors.items()}, read)
