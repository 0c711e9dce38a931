"""torch.ops.umbra.* on the fake NPU: the real extension, compiled against the real wheel."""

import functools
import sys
from pathlib import Path

import torch

from ops.ascend.vector_core import extension, schemas  # noqa: F401 (declares the ops)

BUILT = Path(sys.prefix) / "umbra_ascendc.so"


@functools.cache
def load_extension() -> None:
    newest = max(Path(file).stat().st_mtime_ns for file in (extension.SOURCE, extension.__file__))
    if not BUILT.is_file() or BUILT.stat().st_mtime_ns < newest:
        extension.build(BUILT)
    torch.ops.load_library(BUILT)
