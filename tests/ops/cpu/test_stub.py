"""The committed signatures of the native module are those of the built one."""

from tools.native_stub import STUB, native_stub


def test_the_stub_is_fresh() -> None:
    assert STUB.read_text() == native_stub(), "run .venv/bin/python -m tools.native_stub"
