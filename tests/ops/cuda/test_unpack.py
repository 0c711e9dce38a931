"""Experts' blocks unpacked by PyTorch have the values that the CPU's kernels read in them."""

import pytest
import torch

from umbra.ops.cuda.unpack import biases, unpack
from umbra.ops.formats import Format
from umbra.ops.interface import ExpertKind
from umbra.tools.gpu_check.blocks import FORMATS, random_blocks


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_values_are_those_of_the_cpu(format: Format) -> None:
    inner, hidden = (64, 96) if format.group in (0, 32) else (256, 512)
    shape, blocks = random_blocks(3, inner, hidden, format)
    starts = torch.tensor([2, 0]) * shape.block_bytes
    w13, w2 = (unpack(blocks, starts, shape, name, torch.float32) for name in shape.shapes)
    gate, up = w13.chunk(2, 1)
    for which, values in (("gate", gate), ("up", up), ("down", w2[:, :hidden])):
        for expert, ours in zip((2, 0), values, strict=True):
            wanted = shape.dequantised(blocks[expert].data_ptr(), which)
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_biases_are_read() -> None:
    shape, blocks = random_blocks(3, 64, 96, Format("q4", 32), ExpertKind(biased=True))
    starts = torch.tensor([2, 0]) * shape.block_bytes
    for name, (rows, _) in shape.shapes.items():
        at, ours = shape.offsets[name][3], biases(blocks, starts, shape, name)
        wanted = blocks[2, at : at + 4 * rows].view(torch.float32)
        if name == "w13":  # 16 rows of gate, then as many of up
            wanted = torch.cat([wanted.view(-1, 2, 16)[:, i].flatten() for i in range(2)])
        assert torch.equal(ours[0], wanted)
