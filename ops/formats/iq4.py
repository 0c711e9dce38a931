"""iq4, of GGUF: codes of four bits, w = d * scale * codes[level]. IQ4_NL is such with scales of 1."""

from umbra.ops.formats.spec import BlockType, FormatSpec, Nesting

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

IQ4 = FormatSpec(
    "iq4",
    4,
    group=256,
    codes=LEVELS,
    nesting=Nesting(32),
    block_types=(BlockType("IQ4_XS", 23, 256, 136), BlockType("IQ4_NL", 20, 32, 18)),
)
