"""Rows in the blocks of ggml's types, as a GGUF file has them, decoded only where they are not packed as they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from umbra.ops.formats.quantised import Nested, Quantised, floats
from umbra.ops.formats.spec import Format, FormatSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Undecoded:
    """m rows in the blocks of one of ggml's types, as a GGUF file has them."""

    type: int  # ggml's number
    data: "Tensor"  # (m, blocks of a row, bytes of a block) uint8
    skipped: int  # columns that come before these in the first block, a multiple of 32
    columns: int
    kept: Format | None  # the format that keeps them
    decode: "Callable[[Tensor], Tensor | Quantised]"  # all columns of blocks, as levels or as floats
    factor: float = 1.0  # of all weights, which a tensor of its own holds

    @cached_property
    def decoded(self) -> "Tensor | Quantised":
        values, end = self.decode(self.data), self.skipped + self.columns
        if isinstance(values, Nested) and (self.skipped, end) != (0, values.levels.shape[1]):
            return values.columns(self.skipped, end)
        return values if isinstance(values, Quantised) else values[:, self.skipped : end]


class Blocks(Quantised):
    """Rows that the CPU's packing reads as they are, and that others decode."""

    of: Undecoded

    def __init__(self, of: Undecoded):
        vars(self)["of"] = of  # the fields of a frozen class cannot be set otherwise

    @property
    def _levels(self) -> Quantised:
        if not isinstance(self.of.decoded, Quantised):
            raise AssertionError("a type that no format keeps has floats only")
        return self.of.decoded

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.of.data), self.of.columns

    spec: FormatSpec = property(lambda self: self._levels.spec)  # type: ignore[assignment]
    levels = property(lambda self: self._levels.levels)
    scales = property(lambda self: self._levels.scales)
    zeros = property(lambda self: self._levels.zeros)

    @property
    def finite(self) -> bool:
        decoded = self.of.decoded
        return decoded.finite if isinstance(decoded, Quantised) else bool(decoded.isfinite().all())

    def fits(self, format: Format) -> bool:
        kept = self.of.kept
        return bool(kept and kept.kind == format.kind and kept.group % format.group == 0 and not format.zeros)

    def floats(self) -> "Tensor":
        return floats(self.of.decoded)

    def rows(self, rows: "list[int]") -> "Blocks":
        """These rows, in this order."""
        return Blocks(replace(self.of, data=self.of.data[rows]))
