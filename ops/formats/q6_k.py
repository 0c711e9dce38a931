"""q6_k, of GGUF: integers of six bits with a scale for 16 columns, w = d * scale * (level - 32)."""

from umbra.ops.formats.spec import BlockType, FormatSpec, Nesting

Q6_K = FormatSpec("q6_k", 6, group=256, middle=32, nesting=Nesting(16), block_types=(BlockType("Q6_K", 14, 256, 210),))
