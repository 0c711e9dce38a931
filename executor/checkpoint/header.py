"""Checks a safetensors file's header before the library maps the file, so that an error names the tensor.

The layout: 8 bytes n, little-endian; n bytes of JSON, {name: {dtype, shape, data_offsets: [begin, end]}}; then the
tensors' bytes, one after the other without gaps. Nothing but the header is read, and of that a bounded number of bytes.
"""

import math
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError, short
from umbra.base.files import LARGEST_FILE, check_pointer, parsed

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MOST_VALUES = 1 << 21  # in a header, which has eight for each tensor


def check_header(path: Path) -> list[str]:
    """Returns the names of the file's tensors. Refuses the file unless every tensor has a known type and the size that
    its shape gives, no two have the same name, and together they fill the file without gaps or overlaps."""
    try:
        if not path.is_file():
            raise UserError(f"{path} does not exist, but the checkpoint's index names it")
        entries, room = _read(path)
        metadata = entries.pop("__metadata__", None)
        if isinstance(metadata, dict) and metadata.get("format") == "mlx":
            raise UserError(f"{path}: MLX wrote it, which stores weights in its own way: give what it was made from")
        end = 0
        for name, (begin, after) in sorted(((n, _extent(n, e)) for n, e in entries.items()), key=lambda item: item[1]):
            if begin != end:
                raise ValueError(f"tensor {name:.200} begins at byte {begin}, where {end} was expected")
            if after > room:
                raise ValueError(f"tensor {name:.200} ends at byte {after} of {room}")
            end = after
        if end != room:
            raise ValueError(f"{room} bytes of tensors, but the header tells of {end}")
        return list(entries)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: truncated or corrupt: {error}") from None


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """(the header, the number of bytes that follow it)"""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(64)
        check_pointer(path, begin)
        file.seek(8)
        length = int.from_bytes(begin[:8], "little")
        if length > min(size - 8, LARGEST_FILE):
            raise ValueError(f"its header should have {length} bytes, the file has {size}, {LARGEST_FILE} are allowed")
        header = parsed(file.read(length), MOST_VALUES, object_pairs_hook=_without_repeats)
    if not isinstance(header, dict):
        raise ValueError("its header must be a JSON object")
    return header, size - 8 - length


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name:.200} stands twice in the header")
        members[name] = value
    return members


def _extent(name: str, entry: Any) -> tuple[int, int]:
    """(first byte, byte after the last) of a tensor, counted from the end of the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name:.200} must have dtype, shape and data_offsets, not {short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name:.200} has type {short(dtype)}, which is none of safetensors' types")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise ValueError(f"tensor {name:.200} has {what} {short(numbers)}, which must be a list of sizes")
    if len(shape) > 8 or len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"tensor {name:.200} has type {dtype} and shape {short(shape)}, but offsets {short(offsets)}")
    return offsets[0], offsets[1]
