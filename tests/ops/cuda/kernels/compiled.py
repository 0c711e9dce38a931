"""Compiles every kernel as calls of a model's size would, for a GPU that need not be there, and prints what each takes:

    .venv/cuda/bin/python -m tests.ops.cuda.kernels.compiled 90 >tests/ops/cuda/kernels/resources.json

Arguments are tensors on the device "meta", so types, strides and multiples of 16 are those of a real call.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from umbra.ops.cpu.shadow import ExpertBlocks
from umbra.ops.cuda import kernels
from umbra.ops.cuda.kernels.publish import publish
from umbra.ops.formats import Format
from umbra.ops.interface import Heads, Paged, Recurrent
from umbra.tools.gpu_check.blocks import FORMATS

Resources = dict[str, dict[str, int]]  # by call and kernel, the most of all its variants in the call


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


integers, words, floats = (partial(empty, dtype=t) for t in (torch.int64, torch.int32, torch.float32))


def experts(format: Format) -> None:
    """A row with 8 of 128 experts of Qwen3-30B-A3B."""
    shape = ExpertBlocks(768, 2048, format)
    memory = empty(128 * shape.block_bytes, dtype=torch.uint8)
    kernels.mixture(empty(1, 2048), floats(1, 8), integers(1, 8), shape, memory, integers(128), 0)
    kernels.unpack(memory, integers(8), shape, "w13", torch.bfloat16)


def paged() -> Paged:
    return Paged(empty(0), integers(4, 128), integers(5), integers(4))


def attention(width: int, window: int | None, dtype: torch.dtype = torch.bfloat16) -> None:
    cache = empty(512, 64, 4, width, dtype=dtype)
    sinks = None if window is None else empty(32, dtype=dtype)
    kernels.attention(empty(4, 32, width, dtype=dtype), cache, cache, paged(), 0.1, window, sinks)


def latents() -> None:
    kernels.latent_attention(empty(4, 128, 512), empty(4, 128, 64), (empty(512, 64, 1, 576),), paged(), 0.1)


def states() -> None:
    """The layers with states of Qwen3-Next."""
    tables = Recurrent(integers(5), *(words(4) for _ in range(5)))
    kernels.causal_conv(empty(4, 8192), floats(4, 8192), floats(6, 6, 8192), tables)
    rates, inputs = floats(32), floats(6, 3, 2048 + 4096 + 64)
    pair = empty(4, 32), empty(4, 32)
    kernels.gated_delta_rule(empty(4, 8192), *pair, rates, rates, floats(6, 32, 128, 128), inputs, tables)


def states_by_row() -> None:
    """The layers of Kimi-Linear, of whose states each row has a decay."""
    tables = Recurrent(integers(5), *(words(4) for _ in range(5)))
    qkv, a, b, inputs = empty(4, 12288), empty(4, 4096), empty(4, 32), floats(6, 3, 2 * 4096 + 4096 + 32)
    kernels.gated_delta_rule(qkv, a, b, floats(32), floats(4096), floats(6, 32, 128, 128), inputs, tables)


def of_rows() -> None:
    """Rows of a layer of Qwen3-30B-A3B, and a sigmoid router with a bias."""
    kernels.add_rms_norm(empty(4, 2048), empty(4, 2048), empty(2048), 1e-6)
    cos, cache = floats(4, 128), empty(512, 64, 4, 128)
    heads = Heads(4, 1e-6, empty(128), empty(128), cos, cos)
    kernels.norm_rope_write(empty(4, 5120), heads, cache, cache, integers(4), None)
    kernels.route_sigmoid(floats(4, 128), floats(128), 8, True)
    kernels.silu_mul(empty(4, 1536))


def published() -> None:
    out = empty(4, 2048), words(4, 8), floats(4, 8), words(128), integers(128)
    publish((empty(4, 2048), integers(4, 8), floats(4, 8), integers(128)), out)


CALLS: dict[str, Callable[[], None]] = {
    **{f"experts {f.kind}{' with zeros' if f.zeros else ''}": partial(experts, f) for f in FORMATS},
    "attention": partial(attention, 128, None),
    "attention in a window": partial(attention, 64, 128),
    "attention in float32": partial(attention, 128, None, torch.float32),
    "latents": latents,
    "states": states,
    "states by row": states_by_row,
    "publish": published,
    "rows": of_rows,
}


def resources(call: Callable[[], None], capability: int) -> Resources:
    """Returns the use of each kernel that `call` launches: registers of a thread, bytes of its stack (where registers
    spill), and shared memory of a program. Nothing is run."""
    target = GPUTarget("cuda", capability, 32)
    backend: Any = make_backend(target)
    taken: Resources = {}

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialized, options = binder(*given, **named, debug=False)
        options, *source = kernel._pack_args(backend, named, bound, specialized, options)
        code: Any = triton.compile(ASTSource(kernel, *source), target=target, options=options.__dict__)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert numbers, usage
        taken[kernel.__name__] = {
            "registers": int(numbers[1]),
            "stack": int(numbers[2]),
            "shared": code.metadata.shared,
        }

    launch = JITFunction.run
    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = launch
    return taken


if __name__ == "__main__":
    capabilities, names = sys.argv[1].split(","), sys.argv[2:] or list(CALLS)
    table = {c: {name: resources(CALLS[name], int(c)) for name in names} for c in capabilities}
    print(json.dumps(table, indent=1))
