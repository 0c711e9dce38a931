"""torch.ops.umbra.* on the fake NPU: the real extension, compiled against the real wheel."""

import functools
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch

from umbra.ops.ascend.vector_core import extension, headers, schemas  # noqa: F401 (declares the ops)


@functools.cache
def built() -> Path:
    """The extension, compiled once for each content of its sources. Several processes may call this at the same
    time."""
    files = (extension.SOURCE, headers.TORCH, Path(extension.__file__))
    sources = b"".join(path.read_bytes() for path in files)
    where = Path(sys.prefix) / f"umbra_ascendc-{hashlib.sha256(sources).hexdigest()[:16]}.so"
    if not where.is_file():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
            library = Path(folder) / where.name
            extension.build(library)
            os.replace(library, where)
    return where


@functools.cache
def load_extension() -> None:
    torch.ops.load_library(built())
