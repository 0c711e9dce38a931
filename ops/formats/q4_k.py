"""q4_k, of GGUF: integers of four bits, w = (d * scale) * level - dmin * minimum. Of GGUF's types with one scale for 32
columns, Q4_1 is such with a scale and a minimum of 1 and dmin = -m."""

from umbra.ops.formats.spec import BlockType, FormatSpec, Nesting

Q4_K = FormatSpec(
    "q4_k",
    4,
    group=256,
    nesting=Nesting(32, minimums=True),
    block_types=(BlockType("Q4_K", 12, 256, 144), BlockType("Q4_1", 3, 32, 20)),
)
