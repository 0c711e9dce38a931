"""mxfp4: floats of four bits (e2m1), 32 of which share a power of two (e8m0), w = codes[level] * scale."""

from umbra.ops.formats.spec import BlockType, FormatSpec

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*POSITIVE, *(-value for value in POSITIVE))  # the value of each code

MXFP4 = FormatSpec(
    "mxfp4",
    4,
    group=32,
    scale_type="uint8",
    codes=E2M1,
    block_types=(BlockType("MXFP4", 39, 32, 17),),
    # Root mean squares, of normal weights, in groups of 32.
    rounded_again="MXFP4 is rounded again, to 4-bit integers: each matrix of experts is off by 7 % of its norm, by 8 % "
    "with zero_points: true",
)
