"""q8: integers of eight bits, w = (level - 128) * scale, with a float16 scale for every group of a row. A checkpoint's
levels may have zero points of their own in place of 128."""

from umbra.ops.formats.spec import BlockType, FormatSpec

Q8 = FormatSpec("q8", 8, group=32, middle=128, zero_points=True, block_types=(BlockType("Q8_0", 8, 32, 34),))
