"""W4A16 products on Ascend's vector cores: our own operators, which `bash ops/ascend/vector_core/build.sh` builds."""

from pathlib import Path

from errors import UserError

BUILD = Path(__file__).parent / "build"
EXTENSION = BUILD / "umbra_ascendc.so"
PACKAGE = BUILD / "opp" / "vendors" / "umbra"  # of CANN's custom operators


def package_path(given: str) -> str:
    """ASCEND_CUSTOM_OPP_PATH with our package before what was `given`. Must be set before torch_npu is loaded."""
    own = [str(PACKAGE)] if PACKAGE.is_dir() else []
    return ":".join([*own, *(path for path in given.split(":") if path and path not in own)])


def built() -> int:
    """When, in nanoseconds; 0: never."""
    return EXTENSION.stat().st_mtime_ns if EXTENSION.is_file() else 0


def load() -> None:
    """Gives the ops of `schemas.py` their kernels on the NPU."""
    import torch

    try:
        torch.ops.load_library(EXTENSION)
    except OSError as error:
        raise UserError(
            f"{EXTENSION}: cannot be loaded: {error}: build it again: bash ops/ascend/vector_core/build.sh"
        ) from None
