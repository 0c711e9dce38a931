"""Finds out the format of a checkpoint from its config.json."""

from collections.abc import Callable
from pathlib import Path

from executor.checkpoint.formats.awq import Awq
from executor.checkpoint.formats.compressed_tensors import CompressedTensors
from executor.checkpoint.formats.fp8 import Fp8
from executor.checkpoint.formats.gptq import Gptq
from executor.checkpoint.formats.scheme import Scheme, Unquantised
from models.hf_config import HfConfig, read_json

SCHEMES: dict[str, Callable[[HfConfig], Scheme]] = {
    "awq": Awq,
    "gptq": Gptq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
}


def read_scheme(folder: Path) -> Scheme:
    """The format of the checkpoint in `folder`."""
    config = HfConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    for key in ("quantization_config", "compression_config"):
        if config.value(key) is not None:
            inner = config.inner(key)
            method = inner.one_of("quant_method", allowed=tuple(SCHEMES))
            return SCHEMES[method](inner)
    return Unquantised()
