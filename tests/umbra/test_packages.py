"""The project as pip installs it, and users' own modules beside its packages."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from umbra import PACKAGES
from umbra.files import ROOT

BACKEND = "import sys; sys.path.insert(0, 'tools'); import build_backend; build_backend."


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an editable install puts among the site packages."""
    folder = tmp_path_factory.mktemp("installed")
    done = python(f"{BACKEND}build_editable({str(folder)!r})", ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("umbra_infer-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_project_installs_editable(site: Path, tmp_path: Path) -> None:
    """Scripts in any folder then import the project; so do those beside its folder, if that has the name `umbra`."""
    [commands] = site.glob("*.dist-info/entry_points.txt")
    assert "umbra = umbra.cli:main" in commands.read_text()
    (tmp_path / "umbra").mkdir()
    names = ", ".join(["umbra", *PACKAGES])
    done = python(f"import site; site.addsitedir({str(site)!r}); import {names}; print(umbra.__path__[0])", tmp_path)
    assert done.stdout == f"{ROOT / 'umbra'}\n", done.stderr


def test_any_other_install_is_refused(tmp_path: Path) -> None:
    done = python(f"{BACKEND}build_wheel({str(tmp_path)!r})", ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: Umbra runs from its folder and installs only as editable: pip install -e .\n"


@pytest.mark.parametrize("theirs", ["models.py", "ops/__init__.py"])
def test_a_module_that_hides_a_package_is_named(theirs: str, site: Path, tmp_path: Path) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).touch()
    shown = theirs.removesuffix("/__init__.py")
    line = f"./{shown} hides Umbra's package {shown.removesuffix('.py')!r}: rename it or run from another folder"
    paths = f"import site; site.addsitedir({str(site)!r}); "
    done = python(f"{paths}import umbra", tmp_path)
    assert done.stderr.splitlines()[-1] == f"ImportError: {line}"
    done = python(f"{paths}import sys; sys.argv = ['umbra', 'list']; from umbra.cli import main", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n")
