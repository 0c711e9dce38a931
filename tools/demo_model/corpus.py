"""Extract Jane Austen's six novels from Debian's package r-cran-janeaustenr, without needing R.

    apt-get update && apt-get download r-cran-janeaustenr && dpkg-deb -x r-cran-janeaustenr_*.deb austen
    .venv/bin/python -m umbra.tools.demo_model.corpus austen corpus

The package holds an R "lazy-load" database: `Rdata.rdx` lists where each object lies in `Rdata.rdb`, and each
object is one compressed, serialised R character vector (XDR, big-endian).
"""

import bz2
import struct
import sys
import zlib
from pathlib import Path

INTSXP_PAIR = b"\0\0\0\x0d\0\0\0\x02"  # an integer vector of length 2: (offset, length) of one object
STRSXP, CHARSXP = 16, 9


def index_entries(rdx: bytes) -> list[tuple[int, int]]:
    """The (offset, length) pairs that the index holds, in file order."""
    raw = zlib.decompress(rdx, wbits=47)
    entries, at = [], raw.find(INTSXP_PAIR)
    while at >= 0:
        entries.append(struct.unpack_from(">ii", raw, at + 8))
        at = raw.find(INTSXP_PAIR, at + 16)
    return entries


def decompress(entry: bytes) -> bytes:
    """An entry is a 4-byte length, then a one-letter tag for bzip2, or a bare zlib stream."""
    return bz2.decompress(entry[5:]) if entry[4:5] == b"2" else zlib.decompress(entry[4:])


def character_vector(data: bytes) -> list[str]:
    """Decode one serialised R character vector (format version 2, or 3 with its native-encoding field)."""
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialisation")
    at = 14
    if struct.unpack_from(">i", data, 2)[0] == 3:
        at += 4 + struct.unpack_from(">i", data, at)[0]
    kind, count = struct.unpack_from(">ii", data, at)
    if kind & 0xFF != STRSXP:
        raise ValueError(f"R type {kind & 0xFF} is not a character vector")
    at += 8
    strings = []
    for _ in range(count):
        kind, size = struct.unpack_from(">ii", data, at)
        if kind & 0xFF != CHARSXP:
            raise ValueError(f"R type {kind & 0xFF} inside a character vector")
        size = max(size, 0)  # NA has length -1
        strings.append(data[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return strings


def main(package: Path, out: Path) -> None:
    data = package / "usr/lib/R/site-library/janeaustenr/data"
    database = (data / "Rdata.rdb").read_bytes()
    out.mkdir(parents=True, exist_ok=True)
    for offset, length in index_entries((data / "Rdata.rdx").read_bytes()):
        lines = character_vector(decompress(database[offset : offset + length]))
        title = next(line for line in lines if line.strip())
        name = "_".join(title.lower().replace("&", "and").split())
        (out / f"{name}.txt").write_text("\n".join(lines) + "\n")
        print(f"{name:24} {len(lines):6} lines {sum(map(len, lines)):8} characters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
