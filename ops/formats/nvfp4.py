"""nvfp4: floats of four bits (e2m1), 16 of which share an e4m3 float, and all of a row a float32,
w = codes[level] * (d * scale). A checkpoint has one such float for a matrix; matrices whose rows are joined here may
differ in it."""

from umbra.ops.formats.mxfp4 import E2M1
from umbra.ops.formats.spec import BlockType, FormatSpec, Nesting

NVFP4 = FormatSpec(
    "nvfp4",
    4,
    group=32,
    codes=E2M1,
    nesting=Nesting(16, of_rows=True),
    block_types=(BlockType("NVFP4", 40, 64, 36),),
    rounded_again="NVFP4 is rounded again, to 4-bit integers in larger groups",
)
