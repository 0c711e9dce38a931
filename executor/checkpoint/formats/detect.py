"""Finds out the format of a checkpoint from its config.json and the names of its tensors."""

import itertools
from collections.abc import Callable
from pathlib import Path

from executor.checkpoint.formats.auto_round import AutoRound
from executor.checkpoint.formats.awq import Awq
from executor.checkpoint.formats.compressed_tensors import CompressedTensors
from executor.checkpoint.formats.fp8 import Fp8, Fp8Matrix
from executor.checkpoint.formats.gguf import GgufScheme
from executor.checkpoint.formats.gptq import Gptq
from executor.checkpoint.formats.modelslim import Modelslim
from executor.checkpoint.formats.mxfp4 import Mxfp4
from executor.checkpoint.formats.scheme import Scheme, Unquantised
from executor.checkpoint.index import description_in, names_in
from models.gguf.folder import INDEX, read_index
from models.hf_config import HfConfig
from models.registry import aliases_of
from umbra.files import read_json

SCHEMES: dict[str, Callable[[HfConfig], Scheme]] = {
    "awq": Awq,
    "gptq": Gptq,
    "auto-round": AutoRound,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "mxfp4": Mxfp4,
}


def read_scheme(folder: Path) -> Scheme:
    """The format of the checkpoint in `folder`, which need not hold weights."""
    if (folder / INDEX).is_file():
        return GgufScheme(read_index(folder))
    config = HfConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    description = description_in(folder)
    scheme = Modelslim(description) if description else _said(config)
    scheme.aliases = aliases_of(config.data)
    scheme.names = names_in(folder, scheme.aliases)
    # Matrices of an FP8 original may have been left next to those that were quantised again.
    blocks = any(name.endswith(".weight_scale_inv") for name in scheme.names or ())
    if blocks and scheme.encodings and not isinstance(scheme, Fp8):
        scheme.encodings += (Fp8Matrix(),)
    return scheme


def _said(config: HfConfig) -> Scheme:
    for holder, key in itertools.product((config, config.text), ("quantization_config", "compression_config")):
        if holder.value(key) is not None:
            inner = holder.inner(key)
            method = inner.one_of("quant_method", allowed=tuple(SCHEMES))
            return SCHEMES[method](inner)
    return Unquantised()
