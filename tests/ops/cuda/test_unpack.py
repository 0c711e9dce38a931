"""Experts' blocks unpacked by PyTorch have the values that the CPU's kernels read in them."""

import pytest
import torch

from tests.ops.cuda.blocks import FORMATS, random_blocks
from umbra.ops.cuda.unpack import biases, unpacked
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_values_are_those_of_the_cpu(format: Format) -> None:
    inner, hidden = (64, 96) if format.group in (0, 32) else (256, 512)
    shape, blocks = random_blocks(2, inner, hidden, format)
    w13, w2 = unpacked(blocks, shape, "w13"), unpacked(blocks, shape, "w2")
    gate, up = w13.unflatten(1, (-1, 2, 16)).unbind(2)
    for which, values in (("gate", gate.flatten(1, 2)), ("up", up.flatten(1, 2)), ("down", w2[:, :hidden])):
        for block, ours in zip(blocks, values, strict=True):
            torch.testing.assert_close(ours, shape.dequantised(block.data_ptr(), which), rtol=1e-5, atol=1e-6)


def test_biases_are_read() -> None:
    shape, blocks = random_blocks(2, 64, 96, Format("q4", 32), ExpertKind(biased=True))
    for name, (rows, _) in shape.shapes.items():
        unpacked, at = biases(blocks, shape, name), shape.offsets[name][3]
        assert unpacked is not None
        assert unpacked.shape == (2, rows)
        assert unpacked[1, 3] == blocks[1, at + 12 : at + 16].view(torch.float32)
