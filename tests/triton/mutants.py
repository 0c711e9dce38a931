"""A kernel module with one thing changed, to show that a test notices."""

import importlib.util
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """`module` with `old` replaced; in a file of its own, for Triton reads a kernel's source from its file."""
    text = Path(str(module.__file__)).read_text()
    assert old in text, f"{old!r} is no longer there to be changed"
    path = folder / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed
