"""q5_k, of GGUF: integers of five bits, w = (d * scale) * level - dmin * minimum. Of GGUF's types with one scale for 32
columns, Q5_1 is such with a scale and a minimum of 1 and dmin = -m, and Q5_0 with a scale of 1, a minimum of 16 and
dmin = d."""

from umbra.ops.formats.spec import BlockType, FormatSpec, Nesting

Q5_K = FormatSpec(
    "q5_k",
    5,
    group=256,
    nesting=Nesting(32, minimums=True),
    block_types=(BlockType("Q5_K", 13, 256, 176), BlockType("Q5_0", 6, 32, 22), BlockType("Q5_1", 7, 32, 24)),
)
