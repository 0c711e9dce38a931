"""A gated MLP that every token takes: the only one of a dense layer, or a shared expert beside routed ones."""

from torch import Tensor, nn

from umbra.models.batch import Batch
from umbra.models.build import Build
from umbra.models.layers.linear import MergedLinear, RowLinear, Source
from umbra.models.layers.router import Router
from umbra.ops.formats import GROUP_SIZES


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with `gelu` that in place of silu, whose `inner` columns are split over the ranks
    that share attention, in whole quantisation groups: the first ranks may have one more."""

    def __init__(self, build: Build, hidden: int, inner: int, bias: bool = False, gelu: bool = False):
        super().__init__()
        tp, group = build.parallel.attn_tp, GROUP_SIZES[0]
        self.ops, self.gelu = build.ops, gelu
        part = tp.blocks(inner, group if inner % group == 0 and inner >= group * tp.size else 1)
        self.gate_up_proj = MergedLinear(
            build, hidden, [Source(name, inner, part) for name in ("gate_proj", "up_proj")], bias
        )
        self.down_proj = RowLinear(build, "down_proj", inner, hidden, bias, part)

    def activated(self, x: Tensor) -> Tensor:
        return self.ops.gelu_mul(x) if self.gelu else self.ops.silu_mul(x)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down_proj(self.activated(self.gate_up_proj(x, batch)), batch)

    def add_to(self, y: Tensor, x: Tensor, gate: Router | None) -> Tensor:
        """Adds this rank's part of the result, times the sigmoid of what `gate` says, to `y` in place, which is to be
        summed over the ranks. `x` and `y` have all rows of this rank's group. -> y"""
        part = self.down_proj.part_of(self.activated(self.gate_up_proj.of_all_rows(x)))
        return self.ops.add_gated(y, part, gate(x) if gate else None)
