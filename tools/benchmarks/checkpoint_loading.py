"""Measures the loading of a checkpoint of each format into a model on the CPU, compared with plain reads of its files.

    .venv/bin/umbra bench checkpoint_loading [--layers 2] [--formats awq gptq ...] [--rounds 3]

Writes checkpoints of Qwen3-30B-A3B's shape with random weights to a temporary folder, one after another: about 0.35 GB
a layer in 4 bits, 1.2 GB of embedding and head. Each is loaded in a process of its own; loads take turns with reads of
the files, which are in the page cache, into a buffer of 16 MB, and with writes of fresh memory, both on one thread. GB
are those of the files. bfloat16-q4 is quantised while it is read; packed-q4 is the start after that, from the packed
cache, and packed-awq-q4 the start after AWQ was rounded again to q4; gguf has the types of Q4_K_M. --layers 48 of those
takes 36 GB of disk and most of 24 GB of memory.
"""

import argparse
import gc
import json
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from umbra.base.errors import UserError, run_main
from umbra.base.files import ROOT
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.formats.scheme import Needed
from umbra.executor.checkpoint.load import stored_as
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case, load_model_config
from umbra.executor.model_runner import make_runner
from umbra.executor.plan.weight_formats import build_of
from umbra.models.layers.base import Piece, layers_of
from umbra.models.registry import model_class
from umbra.ops.cpu.layout import CpuLayout
from umbra.ops.interface import Ops
from umbra.ops.parallel.groups import Parallel
from umbra.tools.benchmarks.gguf_mix import write_mix

SHAPE = ROOT / "checkpoints/qwen3_30b_a3b_8_layers/config.json"
COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head", r"re:.*mlp\.gate$"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["mlp.gate"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate"]}


def compressed(format: str, bits: int, strategy: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": 128}
    return COMPRESSED | {"format": format, "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}


FORMATS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "bfloat16-q4": None,  # quantised while it is read
    "packed-q4": None,  # the same, from the packed cache
    "packed-awq-q4": AWQ,
    "awq": AWQ,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": {r"-:.*mlp\.gate$": {}}},
    "pack-quantized": compressed("pack-quantized", 4, "group"),
    "int-quantized": compressed("int-quantized", 8, "channel"),
    "fp8": FP8,
    "gguf": None,  # Q4_K_M
    "packed-gguf": None,
}
MAPPED = 1 << 30  # bytes of fresh memory for a start that maps its files: more would push them out of the page cache
TYPES = {"I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


def write(folder: Path, format: str, **shape: int) -> None:
    """Write a checkpoint of random weights in `format` and a case for it; `shape` overrides keys of the config."""
    folder.mkdir()
    gguf = folder / "model.gguf" if format.endswith("gguf") else None
    settings = (
        f"method: {'q4' if format.endswith('q4') else 'auto'}, keep_packed: {format.startswith('packed')}".lower()
    )
    (folder / "case.yaml").write_text(
        f"model_path: {gguf or folder}\n"
        "model_config: {dtype: bfloat16, with_ckpt: true}\n"
        f"quantization: {{{settings}}}\n"
        "data_config: {prompts: [x], input_max_len: 8, max_new_tokens: 1}\n"
    )
    if gguf:
        return write_mix(gguf, "bench_30b_shape_cpu", shape["num_hidden_layers"], "Q4_K_M")
    config = json.loads(SHAPE.read_text()) | shape | {"quantization_config": FORMATS[format]}
    (folder / "config.json").write_text(json.dumps(config))
    case = load_case(str(folder / "case.yaml"))
    build = build_of(case, cast(Ops, CpuLayout(torch.bfloat16)), Parallel(), torch.device("meta"), False)
    model = model_class(case.model_name)(load_model_config(case), build)
    scheme = read_scheme(folder)
    tensors: dict[str, Tensor] = {}
    for path, layer in layers_of(model):
        for piece in layer.pieces(path):
            needed = stored_as([piece], scheme).tensors.items()
            tensors |= {name: random_tensor(name, need, piece) for name, need in needed if not need.zeros}
    return save_file(tensors, folder / "model.safetensors")


def random_tensor(name: str, need: Needed, piece: Piece) -> Tensor:
    """A random tensor, except where the format fixes the values."""
    if name.endswith("weight_shape"):
        return torch.tensor(piece.shape)
    if name.endswith("g_idx"):
        return torch.arange(piece.shape[1], dtype=torch.int32) // 128
    if name.endswith("qzeros") and need.types == ("I32",):
        return torch.full(need.shape, 0x77777777, dtype=torch.int32)
    if need.types[0] in TYPES:
        size = torch.Size(need.shape).numel() * TYPES[need.types[0]].itemsize
        return torch.randint(0, 120, (size,), dtype=torch.uint8).view(TYPES[need.types[0]]).view(need.shape)
    return (torch.rand(need.shape) * 0.01).to(torch.bfloat16 if name == piece.name else torch.float16)


def loaded(folder: Path) -> tuple[float, int, int]:
    """(seconds, bytes that the model keeps, growth of the process's peak memory)"""
    gc.collect()  # the model before
    runner = make_runner(load_case(str(folder / "case.yaml")), folder, RankEnv(0, 1, 0, 1, ""))
    runner.packed_cache = partial(PackedCache, root=folder.parent / "packed")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak_bytes()
    start = time.perf_counter()
    runner.setup()
    seconds = time.perf_counter() - start
    kept = sum(layer.nbytes for _, layer in layers_of(runner.engine.model))
    return seconds, kept, peak_bytes() - before


def peak_bytes() -> int:
    """This process's peak memory; getrusage's number includes that of the process that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def read(path: Path) -> float:
    """Seconds for a plain read of the file."""
    buffer, start = bytearray(1 << 24), time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def touch(nbytes: int) -> float:
    """Seconds for writing fresh memory in huge pages on one thread. The memory is then free, and the next to be taken:
    a virtual machine may give free memory back to its host after seconds, and taking it again costs seconds a GB."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = time.perf_counter()
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    return time.perf_counter() - start


def drop(path: Path) -> None:
    """Takes the file out of the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, rounds: int) -> None:
    """Runs in a process of its own, so that the peak memory is that of the first load."""
    files, packed = [next(folder.glob("model.*"))], folder.name.startswith("packed")
    if packed:
        loaded(folder)  # makes the cache
        source, files = files, list((folder.parent / "packed").rglob("*.bin"))
        for path in [*source, *files]:
            drop(path)
        loaded(folder)  # reads it into an empty page cache, as the first start after a boot does
    size = sum(file.stat().st_size for file in files)
    fresh = min(size, MAPPED if packed else size)
    times = []
    for _ in range(rounds):
        touch(fresh)
        times.append((sum(map(read, files)), touch(fresh), loaded(folder)))
    _, _, (_, kept, peak) = times[0]
    reading, touching, loading = map(statistics.median, zip(*((r, t, load[0]) for r, t, load in times), strict=True))
    best = min(load[0] for *_, load in times)
    print(
        f"{folder.name:<15} {size / 1e9:5.2f} GB, loaded in {loading:6.2f} s: {size / loading / 1e9:5.2f} GB/s, "
        f"the best of them {size / best / 1e9:5.2f}; plain reads {size / reading / 1e9:5.2f}, fresh memory "
        f"{fresh / touching / 1e9:5.2f} GB/s; {kept / 1e9:5.2f} GB kept, peak {(peak - kept) / 1e9:5.2f} GB more",
        flush=True,
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    spawn = multiprocessing.get_context("spawn")
    for format in args.formats:
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top, format)
            writer = spawn.Process(target=write, args=(folder, format), kwargs={"num_hidden_layers": args.layers})
            for child in (writer, spawn.Process(target=measure, args=(folder, args.rounds))):
                child.start()
                child.join()  # its memory is free then, which large models need
                if child.exitcode:
                    raise UserError(f"{format}: writing or loading failed, see above")


if __name__ == "__main__":
    run_main(main)
