"""States of layers that are no pages of a KV cache: one of a size for each sequence, whatever its length."""

import math

from torch import Tensor, nn

from models.batch import Batch
from ops.interface import Recurrent


class RecurrentStates(nn.Module):
    """The states of one layer with a convolution and a gated delta rule, on this rank. The engine allocates places,
    each of which holds both states of a sequence in this layer, and passes them to `bind`."""

    conv: Tensor  # (places, taps - 1, channels) float32, as of `Ops.causal_conv`
    delta: Tensor  # (places, value heads, key width, value width) float32, as of `Ops.gated_delta_rule`
    number: int  # of this layer among those with states: its row in the tables of `Batch.recurrent`

    def __init__(self, taps: int, channels: int, heads: int, key_width: int, value_width: int):
        super().__init__()
        self.conv_shape, self.delta_shape = (taps - 1, channels), (heads, key_width, value_width)

    @property
    def elements(self) -> int:
        """Number of float32 of a place: those of the delta rule, then those of the convolution."""
        return math.prod(self.delta_shape) + math.prod(self.conv_shape)

    def bind(self, conv: nn.Parameter, delta: nn.Parameter, number: int) -> None:
        self.conv, self.delta, self.number = conv, delta, number

    def places(self, batch: Batch) -> Recurrent:
        """Where the step's sequences have their states of this layer."""
        if batch.recurrent is None:
            raise AssertionError("the step has no places of states")
        starts, *tables = batch.recurrent
        return Recurrent(starts, *(table[self.number] for table in tables))
