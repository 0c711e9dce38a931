"""What layers are made with: ops, this rank's place, how matrices are kept."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from errors import UserError
from executor.parallel.groups import Parallel
from ops.format import GROUP_SIZES, Format
from ops.interface import Matrix, Ops

if TYPE_CHECKING:
    from cpu_offload.experts import ShadowedExperts


@dataclass(frozen=True)
class Formats:
    """How matrices are kept. The router and the embedding stay in `plain`: small, or read one row a token."""

    plain: Format
    linear: Format
    head: Format
    # `linear` is the checkpoint's own quantisation, kept as it is by the modules that this says have it.
    own: Callable[[str], bool] | None = None


class Shadows(Protocol):
    """Whoever keeps shadows of experts."""

    def experts(self, path: str, here: slice, inner: int, hidden: int, format: Format) -> "ShadowedExperts | None":
        """`here` of all of the layer that `path` is in; None: they stay on the device for good."""


@dataclass(frozen=True)
class Build:
    """What layers need to know to be made."""

    ops: Ops
    parallel: Parallel
    formats: Formats
    dtype: torch.dtype  # of the embedding and the KV cache
    device: torch.device
    max_positions: int  # longest sequence that the case allows
    offload: Shadows | None = None
    path: str = ""  # of the module that is being made, as in the checkpoint

    def at(self, name: str) -> "Build":
        return dataclasses.replace(self, path=f"{self.path}.{name}" if self.path else name)

    def linear(self, names: Sequence[str], *columns: tuple[int, int]) -> Format:
        """The format of a matrix, or of several kept as one, made of the linear modules `names`, whose `columns` are
        divided: (how many, into how many parts)."""
        format = self.formats.linear
        if self.formats.own is None:
            return format
        if not all(self.formats.own(f"{self.path}.{name}") for name in names):
            return dataclasses.replace(self.formats.plain, tiled=True)
        for group in reversed(GROUP_SIZES):  # a part of a group is a smaller group with the same scale
            if format.group % group == 0 and all(count // parts % group == 0 for count, parts in columns):
                return dataclasses.replace(format, group=group)
        count, parts = next((count, parts) for count, parts in columns if count // parts % GROUP_SIZES[0])
        fine = [n for n in range(1, count + 1) if count % n == 0 and count // n % GROUP_SIZES[0] == 0]
        raise UserError(
            f"{self.path}.{names[0]}: {count} quantised columns over {parts} ranks are {count // parts} on each, no "
            f"multiple of {GROUP_SIZES[0]}: split them over {', '.join(map(str, fine)) or 'none, with method: none'}"
        )

    def matrix(self, rows: int, columns: int, format: Format) -> Matrix:
        return self.ops.matrix(rows, columns, format, self.device)

    def table(self, *shape: int) -> Tensor:
        return fixed(torch.empty(shape, dtype=self.dtype, device=self.device))

    def vector(self, size: int) -> Tensor:
        """Norms and biases: few, and added to what is wide."""
        return fixed(torch.empty(size, dtype=self.ops.vector_type(self.dtype), device=self.device))


def fixed(tensor: Tensor) -> nn.Parameter:
    """A tensor that stays where it is: graphs take Parameters by their address."""
    return nn.Parameter(tensor, requires_grad=False)
