"""Weights on a GPU: experts as the CPU's own blocks, so that one copy on the host serves both and an expert moves
without a conversion; all other matrices as floats, whatever the checkpoint's format.

Experts are filled on the host, one block at a time, and copied once all of the block is written."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.cpu.engine import native
from umbra.ops.cpu.matrix import write_bias
from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.interface import SILU_EXPERTS, ExpertKind, fixed

PARTS = "gate", "up", "down"


class FloatMatrix:
    """A matrix (rows, columns) of floats: of the format's type, or of `dtype` where the format is quantised."""

    def __init__(self, rows: int, columns: int, format: Format, dtype: torch.dtype, device: torch.device):
        self.rows, self.columns = rows, columns
        self.data = fixed(torch.empty(rows, columns, dtype=float_type(format, dtype), device=device))
        self.nbytes, self.storages = self.data.nbytes, [self.data]

    def fill(self, row: int, part: Tensor | Quantised) -> None:
        wide = floats(part)
        self.data[row : row + len(wide)] = wide.to(self.data.device)


class FloatHeads:
    """The matrices of all heads, (count, rows, columns)."""

    def __init__(self, count: int, rows: int, columns: int, format: Format, dtype: torch.dtype, device: torch.device):
        self.rows, self.columns = rows, columns
        self.data = fixed(torch.empty(count, rows, columns, dtype=float_type(format, dtype), device=device))
        self.nbytes, self.storages = self.data.nbytes, [self.data]

    def fill(self, head: int, part: Tensor) -> None:
        self.data[head] = part.to(self.data.device)


class BlockExperts:
    """`data` (count, bytes) uint8 holds a block of `shape` for each expert."""

    def __init__(self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind):
        self.count, self.kind = count, kind
        self.shape = ExpertBlocks(inner, hidden, format, kind)
        self.data = fixed(torch.empty(count, self.shape.block_bytes, dtype=torch.uint8, device=device))
        # The offset of each expert's block from the beginning of `data`.
        self.places = fixed(torch.arange(count, device=device) * self.shape.block_bytes)
        self.nbytes, self.storages = self.data.nbytes, [self.data]
        self._begun: dict[int, tuple[Tensor, set[str]]] = {}  # blocks on the host, and the parts that they have

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> bool:
        block, written = self._of(expert)
        finite = self.shape.fill(block.data_ptr(), which, part)
        self._note(expert, block, written, which)
        return finite

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        block, written = self._of(expert)
        name, row, step = self.shape.rows_of(which)
        start, rows = self.shape.offsets[name][3], self.shape.shapes[name][0]
        write_bias([block[start : start + 4 * rows].view(torch.float32)], row, part, step)
        self._note(expert, block, written, f"{which} bias")

    def stored(self, experts: Sequence[int]) -> Tensor:
        return self.data[list(experts)]

    def restore(self, experts: Sequence[int], stored: Tensor) -> None:
        self.data[list(experts)] = stored

    def _of(self, expert: int) -> tuple[Tensor, set[str]]:
        if native.order():
            raise UserError(
                "platform: cuda: reads experts in the order of x86 only, and this CPU's kernels have another"
            )
        if expert not in self._begun:
            self._begun[expert] = torch.zeros(self.shape.block_bytes, dtype=torch.uint8), set()
        return self._begun[expert]

    def _note(self, expert: int, block: Tensor, written: set[str], what: str) -> None:
        written.add(what)
        if len(written) == len(PARTS) * (1 + self.kind.biased):
            self.data[expert] = block.to(self.data.device)
            del self._begun[expert]


@dataclass(frozen=True)
class ResidentExperts:
    """The experts that are in slots: blocks of `shape` in `data` (bytes) at `places` (experts) int64, below 0: none."""

    shape: ExpertBlocks
    data: Tensor
    places: Tensor

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def kind(self) -> ExpertKind:
        return self.shape.kind


def float_type(format: Format, dtype: torch.dtype) -> torch.dtype:
    """The type of a matrix that the checkpoint has in `format`, beside activations of `dtype`."""
    kind: torch.dtype = dtype if format.quantised else getattr(torch, format.kind)
    return kind


def expert_matrices(
    count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
) -> BlockExperts:
    return BlockExperts(count, inner, hidden, format, device, kind)
