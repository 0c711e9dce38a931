"""kt-kernel's mixture of experts on CPUs for benchmarks: the operators behind two methods of its KTMoEWrapper, which
itself needs a GPU, because it pins memory.

RAWINT4 has a scale for each group of columns; AMXINT4 has one for each row of the weights, and rounds bfloat16 weights
when they are loaded. Both run on AVX-512 where the CPU has no AMX, and read activations in bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.moe_weights import GROUP, Weights
from errors import UserError

INSTALL = ".venv/bin/python -m pip install --no-deps --require-hashes -r tools/supply/locks/compare-moe.lock"
OPERATORS = {"RAWINT4": "AMXInt4_KGroup_MOE", "AMXINT4": "AMXInt4_MOE"}


def library() -> Any:
    try:
        import kt_kernel
    except ImportError:
        raise UserError(
            f"kt-kernel is missing or does not run on this machine; once, for its 100 MB: {INSTALL}"
        ) from None
    return kt_kernel


def thread_pool(threads: int) -> Any:
    """`threads` workers, bound to the first cores of NUMA node 0, and one thread more, which polls without a pause
    while they work."""
    native = library().kt_kernel_ext
    config = native.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    return native.CPUInfer(config)


class KtMoe:
    def __init__(self, weights: Weights, method: str, top_k: int, most: int, pool: Any):
        """A layer with room for `most` tokens at once."""
        moe, self.pool, self.top_k = library().kt_kernel_ext.moe, pool, top_k
        gate = weights["gate"][0].levels
        count, (inner, hidden) = len(weights["gate"]), gate.shape
        self.on_gpu = torch.zeros(count, dtype=torch.bool)  # read in every call
        config = moe.MOEConfig(count, top_k, hidden, inner, self.on_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, pool.backend_, most
        alive = (_set_groups if method == "RAWINT4" else _set_rows)(config, weights)
        self.layer = getattr(moe, OPERATORS[method])(config)
        order = torch.arange(count)
        self._wait_for(self.layer.load_weights_task(order.data_ptr()))
        del alive  # copied by now

    def prepared(self, x: Tensor, weights: Tensor, ids: Tensor) -> Callable[[], Tensor]:
        """A call that computes the layer for `x` (tokens, hidden) into the same tensor every time."""
        x, count = x.to(torch.bfloat16), torch.tensor([len(x)], dtype=torch.int32)
        out = torch.empty_like(x)

        def call() -> Tensor:
            tensors = (tensor.data_ptr() for tensor in (ids, weights, x, out))
            self._wait_for(self.layer.forward_task(count.data_ptr(), self.top_k, *tensors, False))
            return out

        return call

    def _wait_for(self, task: tuple[int, int]) -> None:
        self.pool.submit(task)
        self.pool.sync()


def _set_groups(config: Any, weights: Weights) -> list[list[Tensor]]:
    """Packs the levels, two to a byte, with the scales of each group; returns what must stay until they are loaded."""
    alive = []
    for name, parts in weights.items():
        levels = [part.plain_levels[:, ::2] | part.plain_levels[:, 1::2] << 4 for part in parts]
        scales = [part.in_groups(GROUP)[0].to(torch.bfloat16).contiguous() for part in parts]
        setattr(config, f"{name}_projs", [[tensor.data_ptr() for tensor in levels]])  # of each NUMA node and expert
        setattr(config, f"{name}_scales", [[tensor.data_ptr() for tensor in scales]])
        alive += [levels, scales]
    config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, GROUP, False
    return alive


def _set_rows(config: Any, weights: Weights) -> list[list[Tensor]]:
    """Hands over bfloat16 weights; returns what must stay until they are loaded."""
    alive = []
    for name, parts in weights.items():
        dense = torch.stack([part.floats().to(torch.bfloat16) for part in parts])
        setattr(config, f"{name}_proj", dense.data_ptr())
        alive.append([dense])
    return alive
