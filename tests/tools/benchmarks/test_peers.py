"""What the benchmarks beside other engines compute themselves, without those engines."""

import struct

import numpy as np
import pytest

from tools.benchmarks.peer_engine import lengthened

pytestmark = pytest.mark.slow


def saved(start: bytes, ids: tuple[int, ...], keys: np.ndarray, values: np.ndarray, transposed: bool) -> bytes:
    """The state of a sequence, from keys and values (layers, tokens, width) of 16 bits."""
    layers, tokens, width = keys.shape
    parts = [start, struct.pack("<I", tokens)]
    parts += [struct.pack(f"<iI{len(ids)}i", position, len(ids), *ids) for position in range(tokens)]
    parts.append(struct.pack("<II", transposed, layers))
    parts += [struct.pack("<iQ", 1, 2 * width) + k.tobytes() for k in keys]
    if transposed:
        parts += [struct.pack("<iII", 1, 2, width) + v.T.tobytes() for v in values]
    else:
        parts += [struct.pack("<iQ", 1, 2 * width) + v.tobytes() for v in values]
    return b"".join([*parts, b"rest"])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("start", "ids"), [(b"", ()), (b"mark, stream", (0,))])
def test_a_saved_sequence_is_made_longer(start: bytes, ids: tuple[int, ...], transposed: bool) -> None:
    keys, values = np.random.default_rng(0).integers(1 << 16, size=(2, 3, 4, 8), dtype=np.uint16)
    longer = lengthened(saved(start, ids, keys, values, transposed), len(start), 12)
    expected = saved(start, ids, np.tile(keys, (1, 3, 1)), np.tile(values, (1, 3, 1)), transposed)
    assert longer == expected
