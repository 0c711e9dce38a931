"""The blocks of ggml's types against gguf's own reader."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from umbra.executor.checkpoint.formats.ggml import values_of
from umbra.models.gguf.types import BY_NAME, FLOATS
from umbra.ops.formats.quantised import floats


@pytest.mark.parametrize("kind", BY_NAME)
def test_every_bit_is_that_of_gguf(kind: str) -> None:
    """Random bytes have every level, infinite scales and NaN; and scales that are not extreme."""
    columns, nbytes = BY_NAME[kind].columns, BY_NAME[kind].nbytes
    blocks = np.random.default_rng(0).integers(0, 256, (64, 3, nbytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    if kind not in FLOATS:
        blocks[32:, :, :2] = np.float16(0.37).tobytes()[0], 0x2E
    if kind == "IQ1_M":  # d has four bits in each of four numbers
        blocks[32:, :, 49::2] = blocks[32:, :, 49::2] & 15 | np.array((0, 0x50, 0xE0, 0x20), np.uint8)
    if kind == "MXFP4":  # 255 is no number in e8m0
        blocks[..., 0] %= 255
    if kind == "NVFP4":  # scales have no sign
        blocks[..., :4] &= 127
    with np.errstate(all="ignore"):
        expected = dequantize(blocks.reshape(64, -1), GGMLQuantizationType[kind])
    got = floats(values_of(kind, torch.from_numpy(blocks))).float().numpy()
    assert got.shape == (64, 3 * columns)
    np.testing.assert_array_equal(got, expected)
