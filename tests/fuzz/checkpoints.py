"""A checkpoint's safetensors files, its index and its configs; and cases."""

import json
from pathlib import Path

from safetensors.numpy import save

from tests.fuzz.target import Target
from umbra.base.files import ROOT
from umbra.executor.checkpoint.files import CheckpointFiles
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.formats.scheme import FLOATS
from umbra.executor.checkpoint.index import INDEX, SINGLE
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.executor.config.load import CASES, load_case
from umbra.models.registry import FAMILIES, family_in, read_config

READ = (*FLOATS, "I8", "U8", "I32", "I64", "F8_E4M3")  # the types that tensors of some format may have
MODULES = (
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.experts.3.gate_proj",
    "model.layers.1.mlp.gate",
)


def _tensors(**shapes: tuple[int, ...]) -> bytes:
    import numpy as np

    return save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, {"format": "pt"})


def header(folder: Path) -> Target:
    def run(data: bytes) -> None:
        (folder / SINGLE).write_bytes(data)
        files = CheckpointFiles(folder)
        for name in list(files.file_of)[:8]:
            shape, kind = files.header(name)
            files.nbytes(name)
            if kind in READ:
                files(name, *(slice(0, 2) for _ in shape))

    def fitting(header: object) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(64)

    entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    kinds = [
        {"a": entry | {"dtype": kind, "shape": [64 * 8 // bits]}}
        for kind, bits in (("I8", 8), ("U8", 8), ("BF16", 16), ("F4", 4), ("F6_E2M3", 6), ("F64", 64), ("F8_E4M3", 8))
    ]
    seeds = [
        _tensors(a=(2, 3), b=(), c=(0, 5)),
        fitting({"a": entry, "__metadata__": {"x": "y"}}),
        *map(fitting, kinds),
    ]
    return Target(run, seeds, json=False)


def index(folder: Path) -> Target:
    (folder / "a.safetensors").write_bytes(_tensors(x=(2,), y=(3,)))
    (folder / "b.safetensors").write_bytes(_tensors(z=(1,)))

    def run(data: bytes) -> None:
        (folder / INDEX).write_bytes(data)
        CheckpointFiles(folder, {"mlp": "block_sparse_moe"})

    places = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    seeds = [
        {"metadata": {"total_size": 24}, "weight_map": places},
        {"weight_map": places | {"w.mlp": "c.safetensors"}},
    ]
    return Target(run, [json.dumps(seed).encode() for seed in seeds])


def config(folder: Path) -> Target:
    def run(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        parsed = read_config(folder, family_in(folder))
        parsed.check_parallel(2, 2, 2, 2, 2)
        _ = (parsed.max_positions, parsed.eos_token_ids, parsed.expert_count, parsed.experts_per_token)

    files = [ROOT / f"checkpoints/{name}/config.json" for name in ("austen_moe", "austen_minimax", "austen_hybrid")]
    qwen, minimax, hybrid = (json.loads(file.read_text()) for file in files)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}
    seeds = [qwen | {"rope_scaling": yarn, "mlp_only_layers": [0]}, minimax | {"num_mtp_modules": 3}, hybrid]
    seeds += [{"model_type": family} for family in FAMILIES]
    return Target(run, [json.dumps(seed).encode() for seed in seeds])


def generation(folder: Path) -> Target:
    def run(data: bytes) -> None:
        (folder / "generation_config.json").write_bytes(data)
        stop_ids(folder, (1,))

    seeds = [{"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20}, {"eos_token_id": 5}, {"eos_token_id": None}]
    return Target(run, [json.dumps(seed).encode() for seed in seeds])


def quantization(folder: Path) -> Target:
    def run(data: bytes) -> None:
        text = b'{"model_type": "qwen3_moe", "quantization_config": %b}' % data
        (folder / "config.json").write_bytes(text)
        scheme = read_scheme(folder)
        for module in MODULES:
            scheme.contradicts(module)
            scheme.kept(module)
            if encoding := scheme.encoding(module):
                encoding.stored(module, 256, 128)

    def compressed(format: str, **weights: object) -> dict[str, object]:
        group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True} | weights}
        groups = {"group_0": group, "group_1": group | {"targets": ["re:.*experts.*"], "format": "int-quantized"}}
        return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}

    seeds = [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["gate"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "dynamic": {"-:.*gate": {}}},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]},
        compressed("pack-quantized", strategy="group", group_size=32),
        compressed("mixed-precision", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        compressed("int-quantized", num_bits=8, strategy="channel"),
        compressed("nvfp4-pack-quantized", type="float", group_size=16),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate*"]},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.b": {"quant_algo": "FP8"}},
        },
    ]
    return Target(run, [json.dumps(seed).encode() for seed in seeds])


def case(folder: Path) -> Target:
    def run(data: bytes) -> None:
        (folder / "case.yaml").write_bytes(data)
        load_case(str(folder / "case.yaml"))

    seeds = [(CASES / f"{name}.yaml").read_bytes() for name in ("demo", "demo_chat", "demo_offload", "demo_tp8")]
    seeds += [b"a: &a [*a]", b"? !!set {x}\n: <<", b"a: 0b1_0:59.5e3", b"!!omap [x: 2001-01-01 00:00:00 +01:00]"]
    return Target(run, seeds, json=False)
