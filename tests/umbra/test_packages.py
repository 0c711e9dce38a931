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
def test_a_user_s_module_of_a_package_s_name(theirs: str, site: Path, tmp_path: Path) -> None:
    """It hides nothing; one that is imported already is named."""
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).touch()
    name = theirs.removesuffix("/__init__.py").removesuffix(".py")
    paths = f"import site; site.addsitedir({str(site)!r}); "
    done = python(f"{paths}from umbra import SamplingParams; import {name}; print({name}.__path__[0])", tmp_path)
    assert done.stdout == f"{ROOT / name}\n", done.stderr
    done = python(f"{paths}import {name}, umbra", tmp_path)
    line = f"{tmp_path / theirs} is imported as {name!r}, the name of a package of Umbra: give it another name"
    assert done.stderr.splitlines()[-1] == f"ImportError: {line}"
