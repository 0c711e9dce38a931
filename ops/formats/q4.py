"""q4: integers of four bits, w = (level - zero) * scale, with a float16 scale for every group of a row, and with each
scale a zero point, or 8 everywhere."""

from umbra.ops.formats.spec import BlockType, FormatSpec

Q4 = FormatSpec("q4", 4, group=32, middle=8, zero_points=True, block_types=(BlockType("Q4_0", 2, 32, 18),))
