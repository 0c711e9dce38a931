"""The cache of compiled test programs: what a file includes decides whether it is compiled again."""

from pathlib import Path

import pytest

from tests.ops.cpu.native import build


def test_a_file_is_compiled_again_when_what_it_includes_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    source, header, inner = (tmp_path / name for name in ("x.cpp", "x.h", "y.h"))
    source.write_text('#include "x.h"\nint f() { return V; }\n')

    def made(text: str, of: Path = header) -> Path:
        of.write_text(text)
        build.hash_of.cache_clear()
        return build.made_once("x.o", ["g++", "-c", str(source)])

    one, two = made("#define V 1\n"), made("#define V 2\n")
    assert one.read_bytes() != two.read_bytes()
    then = one.stat().st_mtime_ns
    assert made("#define V 1\n") == one
    assert one.stat().st_mtime_ns == then
    inner.write_text("#define V 3\n")
    assert len({one, two, made('#include "y.h"\n'), made("#define V 4\n", inner)}) == 4
