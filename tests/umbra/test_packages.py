"""The project as one package: in its tree, beside a user's own modules, and installed by pip."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from umbra.base.files import ROOT
from umbra.ops.cpu import _native

NAMES = [path.name for path in (ROOT / "umbra").iterdir() if path.is_symlink()]


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Runs the command, without the paths that this test's own process was given, and returns its output."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_user_s_modules_of_the_folders_names(tmp_path: Path) -> None:
    """Scripts import their own `models.py`, and the project, also beside a folder `umbra` that has no module in it."""
    (tmp_path / "umbra").mkdir()
    for name in NAMES:
        (tmp_path / f"{name}.py").touch()
    code = f"import {', '.join(NAMES)}; from umbra import SamplingParams; print({NAMES[0]}.__file__)"
    assert run([sys.executable, "-c", code], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}") == (
        f"{tmp_path / NAMES[0]}.py\n"
    )


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_pip_installs_a_package_that_works(native: bool, tmp_path: Path) -> None:
    """The other packages come from this environment. The native module is built by the thorough test, else copied."""
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = tmp_path / "venv" / Path(sysconfig.get_paths()["purelib"]).relative_to(sys.prefix)
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    setting = [] if native else ["--config-settings=wheel.cmake=false"]
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # cmake and ninja among them
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, *setting, f"--config-settings=build-dir={tmp_path / 'build'}", str(ROOT)], tmp_path, **programs)
    package, umbra = site / "umbra", str(python.with_name("umbra"))
    if not native:
        shutil.copy(str(_native.__file__), package / "ops" / "cpu")
    home = {"HOME": str(tmp_path / "home")}
    code = "import umbra; from umbra.ops.cpu import _native; print(umbra.__file__, _native.__file__)"
    assert run([str(python), "-c", code], tmp_path).startswith(f"{package}/__init__.py {package}/ops/cpu/_native")
    assert "demo_tp8" in run([umbra, "list"], tmp_path, **home)
    said = run([umbra, "run", "demo", "--set", "max_new_tokens=4"], tmp_path, **home)
    assert "4 tokens, length" in said
    assert [*(tmp_path / "results" / "demo").glob("*/report.json")]
    chat = "from umbra import LLM; print(len(LLM('demo', max_new_tokens=3).generate(['It is'])[0].tokens))"
    assert run([str(python), "-c", chat], tmp_path, **home).splitlines()[-1] == "3"
    assert not [*package.rglob("results"), *package.rglob("packed_cache")]
