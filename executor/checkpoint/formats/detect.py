"""Finds out the format of a checkpoint from its config.json and the names of its tensors."""

import itertools
from collections.abc import Callable
from pathlib import Path

from umbra.base.files import read_json
from umbra.executor.checkpoint.formats.auto_round import AutoRound
from umbra.executor.checkpoint.formats.awq import Awq
from umbra.executor.checkpoint.formats.compressed_tensors import CompressedTensors
from umbra.executor.checkpoint.formats.fp8 import Fp8, Fp8Matrix
from umbra.executor.checkpoint.formats.gguf import GgufScheme
from umbra.executor.checkpoint.formats.gptq import Gptq
from umbra.executor.checkpoint.formats.modelopt import FILE, ModelOpt
from umbra.executor.checkpoint.formats.modelslim import Modelslim
from umbra.executor.checkpoint.formats.mxfp4 import Mxfp4
from umbra.executor.checkpoint.formats.scheme import Scheme, Unquantised
from umbra.executor.checkpoint.index import description_in, names_in
from umbra.models.gguf.folder import INDEX, read_index
from umbra.models.hf_config import HfConfig
from umbra.models.registry import aliases_of

SCHEMES: dict[str, Callable[[HfConfig], Scheme]] = {
    "awq": Awq,
    "gptq": Gptq,
    "auto-round": AutoRound,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": Mxfp4,
}


def read_scheme(folder: Path) -> Scheme:
    """The format of the checkpoint in `folder`, which need not hold weights."""
    if (folder / INDEX).is_file():
        return GgufScheme(read_index(folder))
    config = HfConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    description = description_in(folder)
    scheme = Modelslim(description) if description else _said(config) or _beside(folder)
    scheme.aliases = aliases_of(config.data)
    scheme.names = names_in(folder, scheme.aliases)
    # Matrices of an FP8 original may have been left next to those that were quantised again.
    blocks = any(name.endswith(".weight_scale_inv") for name in scheme.names or ())
    if blocks and scheme.encodings and not isinstance(scheme, Fp8):
        scheme.encodings += (Fp8Matrix(),)
    return scheme


def _said(config: HfConfig) -> Scheme | None:
    for holder, key in itertools.product((config, config.text), ("quantization_config", "compression_config")):
        if holder.value(key) is not None:
            inner = holder.inner(key)
            method = inner.one_of("quant_method", allowed=tuple(SCHEMES))
            return SCHEMES[method](inner)
    return None


def _beside(folder: Path) -> Scheme:
    """The format that a file of modelopt's says, if there is one."""
    path = folder / FILE
    return ModelOpt(HfConfig(read_json(path), str(path)).inner("quantization")) if path.is_file() else Unquantised()
