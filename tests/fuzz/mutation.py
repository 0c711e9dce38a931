"""Changes inputs at random: their bytes, or the values in their JSON."""

import json
import random
from collections.abc import Sequence
from typing import Any

STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    64,
    128,
    1 << 24,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**30,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e-7,
    1e30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "a",
    "0",
    "null",
    "\0",
    "\ud800",
    "\x1b[2J",
    "\U0001f642",
    "../x",
    "/etc/passwd",
    "x" * 300,
    "re:.*",
    "\\",
    "(",
    "[",
    "{",
    "{{",
    "%s",
    [],
    {},
    [[]],
    [{}],
    {"": 0},
    {"type": "object"},
    ["a", "a"],
]
BYTES = [
    b"\0",
    b"\xff",
    b"\xf0\x9f",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\n",
    b": ",
    b"- ",
    b"&a ",
    b"*a",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
]
DEEP = 40  # levels


def mutated(data: bytes, seeds: Sequence[bytes], is_json: bool, longest: int, rng: random.Random) -> bytes:
    """`data` after one to four changes; parts of `seeds` may come in."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        changed = json_mutated(data, seeds, rng) if is_json and rng.random() < 0.7 else None
        data = bytes_mutated(data, seeds, rng) if changed is None else changed
    return data[:longest]


def bytes_mutated(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 64)))
    other = rng.choice(seeds) if seeds else b""
    start = rng.randrange(len(other) + 1)
    new = rng.choice(
        (
            bytes([rng.randrange(256)]),
            rng.choice(BYTES),
            b"",
            data[at:end] * rng.choice((2, 3, 50)),
            other[start : start + rng.choice((1, 4, 16, 64, 256))],
            str(rng.choice((0, 1, -1, 255, 65536, 1 << 31, 1 << 63, 10**40))).encode(),
        )
    )
    return data[:at] + new + data[end if rng.random() < 0.7 else at :]


def json_mutated(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes | None:
    """None: `data` is no JSON."""
    root = _parsed(data)
    if root is None:
        return None
    holder: list[Any] = [root]
    places: list[tuple[Any, Any]] = [(holder, 0)]
    for value, key in places:  # grows
        inner = value[key]
        if len(places) < 2000 and isinstance(inner, dict | list):
            places += [(inner, k) for k in (list(inner) if isinstance(inner, dict) else range(len(inner)))]
    within, key = rng.choice(places)
    what = rng.randrange(7)
    if what == 0 and len(places) > 1:
        del within[key]
    elif what == 1:
        within[key] = rng.choice(STRANGE)
    elif what == 2:
        other, name = rng.choice(places)
        within[key] = json.loads(json.dumps(other[name]))  # a copy, or a value could come to be in itself
    elif what == 3 and isinstance(within, dict):
        named = [k for _, k in places if isinstance(k, str)]
        within[rng.choice([*named, "", "x", "type", "\ud800"])] = within.pop(key)
    elif what == 4:
        for _ in range(rng.choice((1, 2, DEEP))):
            within[key] = [within[key]] if rng.random() < 0.5 else {str(key): within[key]}
    elif what == 5 and isinstance(within[key], int | float) and not isinstance(within[key], bool):
        within[key] = rng.choice((-within[key], within[key] + 1, within[key] * 2, within[key] % 7, str(within[key])))
    else:
        other = _parsed(rng.choice(seeds)) if seeds else None
        within[key] = rng.choice(STRANGE) if other is None else other
    try:
        return json.dumps(holder[0] if holder else None).encode()
    except (ValueError, RecursionError):
        return None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
