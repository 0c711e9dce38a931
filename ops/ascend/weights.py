"""Weights in the layout of Ascend's matrix products: transposed, in FRACTAL_NZ tiles or packed to 4 bits along outputs.

format     shape               a value is
float      (K, N)              w, in the format's own type
q4         (K, N / 8) int32    (nibble + offset) * scale; nibble i of a word, low bits first, is output 8 n + i, signed
  scales   (K / group, N)      in the model's type, and offsets likewise where there are zero points
w8a8       (K, N) int8         level * scale
  scales   (N)                 float32; of down, which npu_grouped_matmul multiplies, bfloat16 with bfloat16 rows
bias       (N)                 of experts: float32 with bfloat16, else in the model's type
q4 in planes                   for the kernels of the vector cores: ops/ascend/vector_core/planes.py. Other products
                               unpack them to (N, K) first

Experts have one more dimension in front. Only the conversion into tiles needs torch_npu.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.ascend.vector_core.planes import MOST_INNER, MOST_ROWS, PAIRS, Planes, planes_of
from umbra.ops.formats import GROUP_SIZES, Format
from umbra.ops.formats.q4 import Q4
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.formats.rows import in_order
from umbra.ops.formats.w8a8 import W8A8
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, fixed

ND, FRACTAL_NZ = 2, 29
NIBBLES = 8  # number of nibbles in an int32

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]  # allocates the storage of matrices


class Role(Enum):
    """The use of a matrix. In planes, UP has columns of gate and of up in turns, in the order of DOWN's inputs."""

    LINEAR = auto()
    UP = auto()
    DOWN = auto()


class Values(Protocol):
    """Makes the values of a layer's experts for one product (tiles.py)."""

    def take(self, experts: "StoredMatrices") -> Tensor: ...
    def release(self, experts: "StoredMatrices") -> None: ...


class StoredMatrices(Protocol):
    """Matrices of one shape in the products' layout; float matrices have no scales. Those in planes have the inputs in
    `order`, None if x has it already. Without `values`, they are unpacked where a product needs them."""

    data: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    format: Format
    role: Role
    columns: int
    planes: Planes | None
    order: Tensor | None
    values: Values | None
    gathered: bool  # in each step, and so never in tiles


class Bank(Protocol):
    """The experts of one mixture."""

    number: int
    kind: ExpertKind

    @property
    def count(self) -> int: ...
    @property
    def w13(self) -> StoredMatrices: ...
    @property
    def w2(self) -> StoredMatrices: ...


class Matrices:
    """Matrices of `shape` ([matrices,] rows, columns). They are converted into tiles once every row of every matrix
    was put."""

    def __init__(
        self,
        shape: tuple[int, ...],
        format: Format,
        dtype: torch.dtype,
        device: torch.device,
        room: Room | None = None,
        role: Role = Role.LINEAR,
        in_planes: bool = False,
        biased: bool = False,
    ):
        *lead, rows, columns = shape
        make = room or partial(_kept, device=device)
        self.format, self.role, self.columns = format, role, columns
        self.missing = rows * (lead[0] if lead else 1)
        self.tiled = False  # whether `data` is in tiles
        self.scales: Tensor | None = None
        self.offsets: Tensor | None = None
        self.planes: Planes | None = None
        self.order: Tensor | None = None
        self.values: Values | None = None
        self.gathered = False
        # Some ranks never fill it: of those that share an expert, one adds its last bias.
        self.bias = make((*lead, rows), bias_type(dtype)).zero_() if biased else None
        if not format.quantised:
            self.data = make((*lead, columns, rows), getattr(torch, format.kind))
            return
        if format.spec.int8_inputs:
            self.data = make((*lead, columns, rows), torch.int8)
            self.scales = make((*lead, rows), int8_scales(dtype, down=role == Role.DOWN))
            return
        if format.kind != "q4":
            raise UserError(f"quantization.method: {format.kind} has no products on ascend: use q4 or none")
        if columns % format.group or rows % NIBBLES:
            smaller = [str(size) for size in GROUP_SIZES if columns % format.group and not columns % size]
            raise UserError(
                f"quantization.group_size: {format.group}: a matrix of {columns} inputs and {rows} outputs on this "
                f"rank cannot be cut into groups of {format.group} inputs and words of {NIBBLES} outputs: "
                + (f"choose group_size {' or '.join(smaller)}" if smaller else "split it over fewer ranks")
            )
        words: tuple[int, ...] = (columns, rows // NIBBLES)
        scales: tuple[int, ...] = (columns // format.group, rows)
        if in_planes:
            self.planes = planes_of(columns, format.group, ordered=role == Role.DOWN)
            words, scales = self.planes.words_shape(rows), self.planes.scales_shape(rows)
            if role != Role.DOWN:
                self.order = fixed(self.planes.order().int().to(device))
        self.data = make((*lead, *words), torch.uint8 if in_planes else torch.int32)
        self.scales = make((*lead, *scales), dtype)
        if format.zeros:
            self.offsets = make((*lead, *scales), dtype)

    @property
    def storages(self) -> list[Tensor]:
        return [t for t in (self.data, self.scales, self.offsets, self.bias) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.storages)

    def put(self, index: tuple[int, ...], row: int, part: Tensor | Quantised) -> None:
        """Put `part` (m, columns) at rows row .. row + m of the matrix at `index`."""
        count = part.shape[0]
        end = row + count
        if self.scales is None:
            self.data[index][:, row:end] = floats(part).T
        elif self.format.spec.int8_inputs:
            part = in_levels(part, self.format)
            self.data[index][:, row:end] = (part.plain_levels ^ 128).view(torch.int8).T
            self.scales[index][row:end] = part.scales[:, 0]
        elif row % NIBBLES or count % NIBBLES:
            raise UserError(f"quantization: rows {row} to {end} of a matrix do not fill words of {NIBBLES} outputs")
        elif self.planes is not None:
            nibbles, *kept = signed(part, self.format)
            self._put_columns(self.data[index], row, self.planes.pack(nibbles))
            for tensor, values in zip((self.scales, self.offsets), kept, strict=True):
                if tensor is not None:
                    self._put_columns(tensor[index], row, self.planes.keep(values))
        else:
            nibbles, scales, offsets = signed(part, self.format)
            self.data[index][:, row // NIBBLES : end // NIBBLES] = pack(nibbles.T)
            self.scales[index][:, row:end] = scales.T
            if self.offsets is not None:
                self.offsets[index][:, row:end] = offsets.T
        self.missing -= count
        tiled = self.format.tiled or self.format.spec.int8_inputs
        if not self.missing and tiled and self.planes is None and self.data.device.type == "npu":
            self.data, self.tiled = fixed(self._cast(self.data, FRACTAL_NZ)), True

    def stored(self, experts: Sequence[int]) -> Tensor:
        """Returns the planes of `experts` as bytes (experts, bytes): see `MovableExperts`."""
        planes = [t[experts].flatten(1).view(torch.uint8) for t in (self._plain(), *self.storages[1:])]
        return torch.cat(planes, 1)

    def restore(self, experts: Sequence[int], stored: Tensor) -> None:
        planes = [self._plain(), *self.storages[1:]]
        for plane, part in zip(planes, stored.split([p[0].nbytes for p in planes], 1), strict=True):
            plane[experts] = part.contiguous().view(plane.dtype).view(-1, *plane.shape[1:])
        if planes[0] is not self.data:
            self.data.copy_(self._cast(planes[0], FRACTAL_NZ))

    def _plain(self) -> Tensor:
        """The data without tiles: itself, or a copy."""
        return self._cast(self.data, ND) if self.tiled else self.data

    def _cast(self, data: Tensor, layout: int) -> Tensor:
        import torch_npu

        return torch_npu.npu_format_cast(input=data, acl_format=layout, customize_dtype=None)

    def _put_columns(self, to: Tensor, row: int, values: Tensor) -> None:
        """Puts values (planes, m, ...) at columns row .. row + m; of UP, m is all columns of gate or of up."""
        if self.role == Role.UP:
            to.unflatten(1, (-1, 2, PAIRS))[:, :, int(row > 0)] = values.unflatten(1, (-1, PAIRS))
        else:
            to[:, row : row + values.shape[1]] = values


class AscendMatrix(Matrices):
    def __init__(
        self, rows: int, columns: int, format: Format, dtype: torch.dtype, device: torch.device, in_planes: bool = False
    ):
        in_planes = in_planes and not unfit(format, columns)
        super().__init__((rows, columns), format, dtype, device, in_planes=in_planes)
        self.rows = rows

    def fill(self, row: int, part: Tensor | Quantised) -> None:
        self.put((), row, part)


class AscendHeads:
    """The transposed matrices of heads, (count, columns, rows)."""

    def __init__(self, count: int, rows: int, columns: int, format: Format, device: torch.device):
        self.rows, self.columns = rows, columns
        self.data = _kept((count, columns, rows), getattr(torch, format.kind), device)
        self.storages = [self.data]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def fill(self, head: int, part: Tensor) -> None:
        self.data[head] = part.T


class AscendExperts:
    """w13: gate and up side by side, (count, hidden, 2 inner); w2: down, (count, inner, hidden)."""

    def __init__(
        self,
        count: int,
        inner: int,
        hidden: int,
        format: Format,
        dtype: torch.dtype,
        device: torch.device,
        room: Room | None = None,
        in_planes: bool = False,
        kind: ExpertKind = SILU_EXPERTS,
    ):
        if count < 2:
            raise UserError(
                "parallel_config: one expert on a rank: npu_grouped_matmul takes two or more; raise moe_tp_size"
            )
        self.count, self.inner, self.kind = count, inner, kind
        self.number = 0  # tells the experts of a model's layers apart
        self.ahead: AscendMatrix | None = None  # the weight that is read next, if it is to be prefetched
        how = format, dtype, device, room
        if format.spec.int8_inputs and kind != SILU_EXPERTS:
            raise UserError("quantization.method: auto: w8a8 experts with biases, a clipped SwiGLU or GELU: use none")
        in_planes, biased = in_planes and not unfit(format, hidden, inner, kind), kind.biased
        self.w13 = Matrices((count, 2 * inner, hidden), *how, Role.UP, in_planes, biased)
        self.w2 = Matrices((count, hidden, inner), *how, Role.DOWN, in_planes, biased)

    @property
    def storages(self) -> list[Tensor]:
        return [*self.w13.storages, *self.w2.storages]

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        if which == "down":
            self.w2.put((expert,), 0, part)
            return
        if self.w2.planes is not None:  # h needs no other order then
            part = in_order(part, self.w2.planes.order().tolist())
        self.w13.put((expert,), {"gate": 0, "up": self.inner}[which], part)

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        first, matrices = {"gate": (0, self.w13), "up": (self.inner, self.w13), "down": (0, self.w2)}[which]
        if matrices.bias is None:
            raise AssertionError("these experts have no biases")
        matrices.bias[expert, first : first + len(part)] = part

    def stored(self, experts: Sequence[int]) -> Tensor:
        return torch.cat([self.w13.stored(experts), self.w2.stored(experts)], 1)

    def restore(self, experts: Sequence[int], stored: Tensor) -> None:
        sizes = [sum(t[0].nbytes for t in matrices.storages) for matrices in (self.w13, self.w2)]
        for matrices, part in zip((self.w13, self.w2), stored.split(sizes, 1), strict=True):
            matrices.restore(experts, part)


def unfit(format: Format, columns: int, inner: int = 0, kind: ExpertKind = SILU_EXPERTS) -> str:
    """The reason why the kernels of the vector cores cannot read matrices with `columns` inputs, and w2 with `inner`;
    empty if they can."""
    if kind != SILU_EXPERTS:
        return "experts with biases, a clipped SwiGLU or GELU"
    if format.kind != "q4":
        return "the weights do not have 4 bits"
    if format.group not in GROUP_SIZES:
        return f"groups of {format.group}, not of 32, 64 or 128"
    for size, most in ((columns, MOST_ROWS), (inner, MOST_INNER)):
        if size > most:
            return f"{size} inputs, more than {most}"
    return ""


def bias_type(dtype: torch.dtype) -> torch.dtype:
    """The type of biases of experts beside rows of `dtype`, as npu_grouped_matmul takes them."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def int8_scales(dtype: torch.dtype, down: bool) -> torch.dtype:
    """The type of scales of w8a8 beside rows of `dtype`, as npu_grouped_matmul takes those of `down`."""
    return dtype if down and dtype == torch.bfloat16 else torch.float32


def _kept(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return fixed(torch.empty(shape, dtype=dtype, device=device))


def signed(part: Tensor | Quantised, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Returns nibbles, scales and offsets as `quantise` does."""
    part = in_levels(part, format)
    scales, zeros = part.in_groups(format.group)
    offsets = torch.zeros_like(scales) if zeros is None else 8 - zeros.to(scales.dtype)
    return part.plain_levels.to(torch.int32) - 8, scales, offsets


def in_levels(part: Tensor | Quantised, format: Format) -> Quantised:
    """`part` quantised to `format`. Levels already in this format are not rounded again."""
    if isinstance(part, Quantised) and part.fits(format):
        return part
    if format.spec.int8_inputs:
        rows = floats(part)
        scales = rows.abs().amax(1, keepdim=True) / 127
        levels = (rows / torch.where(scales > 0, scales, 1)).round().to(torch.int8)
        return Quantised(W8A8, levels, scales, None)
    nibbles, scales, offsets = quantise(floats(part), format.group, format.zeros)
    zeros = (8 - offsets).to(torch.uint8) if format.zeros else None
    return Quantised(Q4, (nibbles + 8).to(torch.uint8), scales, zeros)


def quantise(part: Tensor, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises (m, K) to nibbles (m, K) int32 in -8 .. 7, scales and offsets (m, K / group), such that
    w = (nibble + offset) * scale.

    Without zero points the offset is 0, and the value of largest magnitude becomes -8, so that scales have signs; with
    them the range is spread over all 16 values, 0 always among them.
    """
    groups = part.float().unflatten(1, (-1, group))  # (m, K / group, group)
    if zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        step = torch.where(scale > 0, scale, 1)
        offset = (low / step).round() + 8  # so that the nibble -8 is `low`
    else:
        scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1) / -8
        step, offset = torch.where(scale != 0, scale, 1), torch.zeros_like(scale)
    nibbles = (groups / step[..., None]).round() - offset[..., None]
    return nibbles.clamp(-8, 7).to(torch.int32).flatten(1), scale, offset


def pack(nibbles: Tensor) -> Tensor:
    """Packs nibbles (K, m) into words (K, m / 8), the first of eight in the lowest bits."""
    words = torch.zeros(nibbles.shape[0], nibbles.shape[1] // NIBBLES, dtype=torch.int32)
    for i in range(NIBBLES):
        words |= (nibbles[:, i::NIBBLES] & 15) << (4 * i)
    return words
