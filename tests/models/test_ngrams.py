"""Factors and rows of the hashes of n-grams, in the sizes of Qwen3.8-Flash-Next."""

from umbra.models.layer_sizes import NgramSizes
from umbra.models.layers.ngram import moduli, multipliers

SIZES = NgramSizes(3, 8, 2560, 20_000_000, 128, 128, 4, 1234, 248046, 248320)


def test_hashes_are_those_of_the_published_table() -> None:
    """Whose checkpoint has these factors, and 128 parts of 2,500,012 rows."""
    assert multipliers(SIZES, 0) == [23703573157769, 20109073645365, 8052911324071]
    rows = moduli(SIZES, 0)
    assert (len(rows), rows[:2]) == (16, [20000003, 20000023])
    assert -(-sum(rows) // 128) * 128 == 128 * 2500012
    assert moduli(SIZES, 1)[0] > rows[-1]  # no modulus is that of another layer
