"""States of layers that are no pages of a KV cache: one of a size for each sequence, whatever its length."""

import math

from torch import nn

from umbra.models.batch import Batch
from umbra.ops.interface import Recurrent


class LayerStates(nn.Module):
    """The states of sequences in one layer, beside pages, on this rank. The engine allocates places, each of which has
    tensors of `shapes` of a sequence, and passes them to `bind`."""

    shapes: tuple[tuple[int, ...], ...]
    number: int  # of this layer among those with states: its row in the tables of `Batch.recurrent`

    @property
    def elements(self) -> int:
        """Number of float32 of a place: those of each of `shapes` follow one another."""
        return sum(map(math.prod, self.shapes))

    def bind(self, number: int, *states: nn.Parameter) -> None:
        raise NotImplementedError

    def places(self, batch: Batch) -> Recurrent:
        """Returns the places of this layer's states of the step's sequences."""
        if batch.recurrent is None:
            raise AssertionError("the step has no places of states")
        starts, *tables = batch.recurrent
        return Recurrent(starts, *(table[self.number] for table in tables))


class ConvolutionStates(LayerStates):
    """The states of a layer with a convolution alone."""

    conv: nn.Parameter  # (places, taps - 1 + drafts, channels) float32, as of `Ops.causal_conv`

    def __init__(self, taps: int, channels: int, drafts: int):
        """`drafts`: most rows of a sequence in a step that may come to nothing."""
        super().__init__()
        self.shapes = ((taps - 1 + drafts, channels),)

    def bind(self, number: int, *states: nn.Parameter) -> None:
        (self.conv,), self.number = states, number


class RecurrentStates(LayerStates):
    """The states of one layer with a convolution and a gated delta rule."""

    delta: nn.Parameter  # (places, value heads, key width, value width) float32, as of `Ops.gated_delta_rule`
    conv: nn.Parameter  # (places, taps - 1 + drafts, channels) float32, as of `Ops.causal_conv`
    inputs: nn.Parameter  # (places, drafts, ...) float32, those of `Ops.gated_delta_rule`

    def __init__(self, taps: int, channels: int, sizes: tuple[int, int, int], decays: int, drafts: int):
        """`sizes`: value heads, and the widths of keys and values. `decays`: the number of them in a row. `drafts`:
        most rows of a sequence in a step that may come to nothing."""
        super().__init__()
        heads, _, width = sizes
        inputs = (channels + heads * width) // 2 + decays + heads
        self.shapes = sizes, (taps - 1 + drafts, channels), (drafts, inputs)

    def bind(self, number: int, *states: nn.Parameter) -> None:
        (self.delta, self.conv, self.inputs), self.number = states, number
