"""W4A16 products on Ascend's vector cores: our own custom operators, which `bash ops/ascendc/build.sh` builds."""

from pathlib import Path

import torch

EXTENSION = Path(__file__).parent / "build" / "umbra_ascendc.so"


def built() -> bool:
    return EXTENSION.is_file()


def load() -> None:
    """The ops of `schemas.py` then have kernels for the NPU."""
    torch.ops.load_library(EXTENSION)
