"""Writes random weights as a GGUF file of several types, as llama.cpp's quantiser names such mixtures.

Levels, scales and minimums are random bytes, which every engine reads from the same blocks; the halves that scale them
make weights of zero mean and about the size of a trained model's.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from umbra.base.errors import UserError
from umbra.executor.config.load import load_case
from umbra.executor.plan.sketch import sketch_of
from umbra.models.registry import model_class
from umbra.tools.benchmarks.gguf_entries import architecture_of, entries
from umbra.tools.benchmarks.gguf_file import PART, Bytes, Content, write_tensors
from umbra.tools.benchmarks.umbra_engine import with_experts

SIZE = 0.02  # standard deviation of weights
# Mean and standard deviation of weights in floats whose names end so.
FLOATS = {"norm.weight": (1.0, SIZE), ".ssm_a": (-0.1, SIZE), "conv1d.weight": (0.0, 0.5)}
# Where a block has the half that scales all of it, or the half and that of minimums with its size in the other's.
HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 1),),
    "Q4_K": ((0, 1), (2, 7.5)),
    "Q5_K": ((0, 1), (2, 15.5)),
    "Q6_K": ((208, 1),),
    "IQ4_XS": ((0, 1),),
}
EXPONENT = 119  # of MXFP4, of the size of SIZE


def more_bits(layer: int, layers: int) -> bool:
    """The layers of which llama.cpp's Q4_K_M gives values and downs more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def q4_k_m(name: str, layers: int) -> str:
    if name == "output.weight":
        return "Q6_K"
    more = "attn_v" in name or "ffn_down" in name
    return "Q6_K" if more and more_bits(int(name.split(".")[1]), layers) else "Q4_K"


def iq4_xs(name: str, layers: int) -> str:
    return "Q6_K" if name == "output.weight" else "Q5_K" if "attn_v" in name else "IQ4_XS"


def mxfp4(name: str, layers: int) -> str:
    return "MXFP4" if "_exps" in name else "Q8_0"


# The type of each quantised matrix, by its name and the number of layers.
MIXES: dict[str, Callable[[str, int], str]] = {
    "Q4_K_M": q4_k_m,
    "Q6_K": lambda name, layers: "Q6_K",
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}


def write_mix(path: Path, case_name: str, layers: int | None, mix: str) -> None:
    """Writes a model of the case's shapes with so many layers, None: as many as the case's checkpoint."""
    case = load_case(case_name, ["method=q8"])
    sketch = sketch_of(case)
    config: Any = sketch.config if layers is None else with_experts(sketch.config, layers)
    if architecture_of(config).names.fused:
        raise UserError(f"--gguf {mix}: of {case.model_name}'s shape, give --format auto, which writes MXFP4")
    generator, contents = np.random.default_rng(0), []
    for entry in entries(model_class(case.model_name)(config, sketch.build), config):
        if entry.format == "q8" or entry.name == "token_embd.weight":
            kind = MIXES[mix](entry.name, config.num_hidden_layers)
            make = partial(random_blocks, generator, entry.shape, kind)
        else:
            sizes = next((sizes for end, sizes in FLOATS.items() if entry.name.endswith(end)), (0.0, SIZE))
            kind, make = "F32", partial(random_floats, generator, entry.shape, *sizes)
        contents.append(Content(entry.name, entry.shape, kind, make))
    write_tensors(path, config, contents)


def random_floats(generator: np.random.Generator, shape: tuple[int, ...], mean: float, size: float) -> Bytes:
    return (generator.standard_normal(shape, np.float32) * np.float32(size) + np.float32(mean)).view(np.uint8)


def random_blocks(generator: np.random.Generator, shape: tuple[int, ...], kind: str) -> Bytes:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    columns, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.frombuffer(bytearray(generator.bytes(int(np.prod(shape)) // columns * nbytes)), np.uint8)
    blocks = blocks.reshape(-1, nbytes)
    if kind == "MXFP4":
        blocks[:, 0] = EXPONENT
    else:
        scaled(blocks[:PART], kind, 1.0)
        scaled(blocks, kind, SIZE / float(dequantize(blocks[:PART], GGMLQuantizationType[kind]).std()))
    return blocks.reshape(*shape[:-1], -1)


def scaled(blocks: Bytes, kind: str, size: float) -> None:
    for at, times in HALVES[kind]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(times * size).tobytes(), np.uint8)
