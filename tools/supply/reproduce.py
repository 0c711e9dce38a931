"""Builds the native module twice, in folders of different names with files of different times, and compares the two
bit for bit; exits with status 1 if they differ:

    .venv/bin/python -m umbra.tools.supply.reproduce
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from umbra.base.errors import UserError, run_main
from umbra.base.files import ROOT

SOURCES = ROOT / "ops" / "cpu" / "csrc"
DAY = 86_400


def built(folder: Path, age_s: int) -> Path:
    """The module, built in `folder` from a copy of the sources that is `age_s` old, as tools/setup.sh builds it."""
    shutil.copytree(SOURCES, folder / "csrc", ignore=shutil.ignore_patterns("build"))
    for path in [*folder.rglob("*")]:
        then = path.stat().st_mtime - age_s
        os.utime(path, (then, then))
    command = f'source tools/setup.sh && umbra_build "{folder}/csrc" "{folder}/build" "{folder}/out"'
    done = subprocess.run(["bash", "-euc", command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{SOURCES.relative_to(ROOT)} does not build: {done.stderr.strip().splitlines()[-1]}")
    (module,) = (folder / "out").glob("_native*.so")
    return module


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError("python -m umbra.tools.supply.reproduce takes no arguments")
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory(prefix="another-name-") as there:
        modules = [built(Path(here), 0), built(Path(there) / "deeper", 400 * DAY)]
        digests = [hashlib.sha256(module.read_bytes()).hexdigest() for module in modules]
    for digest, module in zip(digests, modules, strict=True):
        print(f"{digest}  {module}")
    print("the two are the same" if len(set(digests)) == 1 else "error: the two differ")
    sys.exit(len(set(digests)) - 1)


if __name__ == "__main__":
    run_main(main)
