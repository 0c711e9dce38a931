"""W4A16 products on Ascend's vector cores: custom operators, built by `bash ops/ascend/vector_core/build.sh`."""

from pathlib import Path

from umbra.base.errors import UserError

BUILD = Path(__file__).parent / "build"
EXTENSION = BUILD / "umbra_ascendc.so"
PACKAGE = BUILD / "opp" / "vendors" / "umbra"  # the package of custom operators, as CANN installs it


def package_path(given: str) -> str:
    """Returns the value for ASCEND_CUSTOM_OPP_PATH: our package, if it is built, before the folders in `given`. The
    variable must be set before torch_npu is loaded."""
    own = [str(PACKAGE)] if PACKAGE.is_dir() else []
    return ":".join([*own, *(path for path in given.split(":") if path and path not in own)])


def built(extension: Path = EXTENSION) -> int:
    """The time at which the torch extension was built, in nanoseconds since the epoch; 0 if it is not built."""
    return extension.stat().st_mtime_ns if extension.is_file() else 0


def load(extension: Path = EXTENSION) -> None:
    """Loads the torch extension, which registers the NPU kernels of the ops in schemas.py."""
    import torch

    try:
        torch.ops.load_library(extension)
    except OSError as error:
        raise UserError(
            f"{extension}: cannot be loaded: {error}: build it again: bash ops/ascend/vector_core/build.sh"
        ) from None
