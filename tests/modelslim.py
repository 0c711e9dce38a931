"""Tiny checkpoints as modelslim writes them, element by element from the description of its formats."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised import is_quantised

OFFSET, INPUT = 3.0, torch.tensor(0.0421)  # of activations that have one scale
MOVED = "input_layernorm", "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"
Type = Callable[[str], str]  # the type of a module


def modelslim_tiny(model: Path, to: Path, type_of: Type, old: bool = False, moved: bool = False) -> Path:
    """Writes `to`, in the layout of version 0 if it is `old`, and `to`-floats with the same weights as floats; returns
    the latter. With `moved` the inputs of attention are scaled and moved by its norm, as its weights take back."""
    floats = to.with_name(to.name + "-floats")
    for folder in (to, floats):
        shutil.copytree(model, folder)
    (to / "model.safetensors").unlink()
    weights = load_file(model / "model.safetensors")
    means, tensors, types = dict(weights), {}, {}
    for name, w in weights.items():
        module = name.removesuffix(".weight")
        kind = type_of(module) if is_quantised(name) else "FLOAT"
        smooth = moved and name.endswith(tuple(f"{last}.weight" for last in MOVED))
        columns = torch.arange(w.shape[-1]) % 7
        scale, shift = (0.5 + columns / 8, columns / 9 - 0.3) if smooth else (None, None)
        if kind == "FLOAT":
            tensors[name], types[name] = (w if scale is None else w / scale), "FLOAT"
            if "norm" in name and old:
                tensors[f"{module}.bias"] = torch.zeros(len(w)) if shift is None else shift
            elif shift is not None:
                tensors[f"{module}.bias"] = shift
            continue
        wide = w.double() if scale is None else w.double() * scale
        scales = (wide.abs().amax(1) / 127).float()
        levels = (wide / scales[:, None]).round().to(torch.int8)
        deq = scales * INPUT
        if kind == "W8A8" and not old:
            scales = deq / INPUT
        mean = levels.double() * scales[:, None].double()
        means[name] = (mean if scale is None else mean / scale).float()
        bias = torch.zeros(len(w)).double() if shift is None else -(mean @ shift.double())
        written = {"weight": levels}
        if kind != "W8A8" or old:
            written |= {"weight_scale": scales[:, None], "weight_offset": torch.zeros(len(w), 1)}
        if kind != "W8A8_DYNAMIC":
            units = (bias / deq.double() - OFFSET * levels.sum(1)).round().int()
            words = torch.stack([deq.view(torch.int32), torch.zeros(len(w), dtype=torch.int32)], 1)
            written |= {
                "quant_bias": units,
                "deq_scale": words.view(torch.int64).flatten() if old else deq,
                "input_scale": INPUT.repeat(1),
                "input_offset": torch.tensor([OFFSET]),
            }
        elif shift is not None:
            written["bias"] = bias.float()
        tensors |= {f"{module}.{last}": tensor for last, tensor in written.items()}
        types |= {f"{module}.{last}": "FLOAT" if last == "bias" else kind for last in written}
    if old:
        norms = [name for name in tensors if "norm." in name]
        tensors |= {n.replace("norm.", "norm.module."): tensors[n].clone() for n in norms}
    types |= dict.fromkeys(tensors.keys() - types.keys(), "FLOAT")
    tensors["model.layers.0.self_attn.k_proj.kv_cache_scale"] = torch.ones(4)
    about = {"model_quant_type": "W8A8", "metadata": {"quarot": {}}, "optional": {}, "group_size": 0}
    ending = "_w8a8_dynamic" if old else ""
    (to / f"quant_model_description{ending}.json").write_text(json.dumps(types | about))
    save_file(means, floats / "model.safetensors")
    if old:
        config = json.loads((to / "config.json").read_text()) | {"quantize": "w8a8_dynamic"}
        (to / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in tensors.items()}, to / f"quant_model_weight{ending}.safetensors")
        return floats
    (to / "optional").mkdir()
    save_file({"heads": torch.eye(2)}, to / "optional" / "quarot.safetensors")
    files: dict[str, dict[str, Tensor]] = {f"quant_model_weights-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    for i, (name, tensor) in enumerate(tensors.items()):
        list(files.values())[i % 2][name] = tensor.contiguous()
    for file, part in files.items():
        save_file(part, to / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (to / "quant_model_weights.safetensors.index.json").write_text(json.dumps(index))
    return floats
