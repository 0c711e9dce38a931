"""The house rules that a machine can check: imports run one way, files stay small, heavy libraries stay lazy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from files import ROOT

# Each folder may import itself and what stands to its right; `errors` is everyone's.
# Only these, files or folders, know Ascend's libraries, so that everything else imports on a laptop.
ASCEND = [
    ROOT / place for place in ("executor/platform/ascend/device.py", "executor/platform/ascend/graphs.py", "ops/ascend")
]
ASCEND += [ROOT / "ops/ascend/vector_core/converters.py", ROOT / "cpu_offload/ascend.py"]
ORDER = ["run", "executor", "models", "cpu_offload", "ops", "errors"]
SOURCES = [p for name in ORDER for p in [ROOT / f"{name}.py", *(ROOT / name).rglob("*.py")] if p.is_file()]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    own = ORDER.index(path.relative_to(ROOT).parts[0].removesuffix(".py"))
    for name in imports(path):
        top = name.split(".")[0]
        if top in ORDER:
            assert ORDER.index(top) >= own, f"{path} imports {name}"
        assert top not in ("torch_npu", "torchair") or any(path.is_relative_to(place) for place in ASCEND)


def test_files_stay_small() -> None:
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 300, path


def test_environment_is_read_in_one_file() -> None:
    for path in SOURCES:
        text = path.read_text()
        if path != ROOT / "executor" / "env.py":
            assert "os.getenv" not in text, path
            assert "environ.get" not in text, path
