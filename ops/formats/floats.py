"""Floats without scales. Their names are torch's names of their types."""

from umbra.ops.formats.spec import FormatSpec

FLOAT32 = FormatSpec("float32", 32, int8_products=False)
BFLOAT16 = FormatSpec("bfloat16", 16, int8_products=False)
FLOAT16 = FormatSpec("float16", 16, int8_products=False)
