"""The layers of tools/benchmarks/npu_gemv.py: random weights on the NPU, both ways to compute them, their graphs and
times."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch_npu
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.ascend import moe, vector_core
from umbra.ops.ascend.cann import ALL_ABILITIES
from umbra.ops.ascend.vector_core import calls
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.formats import Format
from umbra.tools.benchmarks.output import Row

BOUND = 0.02  # largest error relative to a result's norm; the reference rounds weights and activations to dtype
NIBBLE = 4.6  # root mean square of -8 .. 7


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    inner: int
    experts: int
    top_k: int
    group: int
    layers: int
    dtype: str
    float_sums: bool = False


@dataclass(frozen=True)
class LayerInputs:
    experts: AscendExperts  # in planes
    plain: AscendExperts  # other experts of the same shape, as npu_grouped_matmul takes them
    x: Tensor  # (batch, hidden)
    ids: Tensor  # (batch, k) int32
    weights: Tensor  # (batch, k)
    nbytes: float  # bytes of the experts in `ids`, each counted once
    float_sums: bool = False

    def custom(self) -> Tensor:
        return calls.moe(self.x, self.weights, self.ids, self.experts, None, self.float_sums)

    def reference(self) -> Tensor:
        return moe.infer_fusion_v2(self.x, self.weights, self.ids, self.plain, ALL_ABILITIES)

    def unpacked(self) -> Tensor:
        """The result of `custom`, by the products of more tokens."""
        order = cast(Tensor, self.experts.w13.order)
        return moe.infer_fusion_v2(self.x.index_select(1, order), self.weights, self.ids, self.experts, ALL_ABILITIES)


def start(extension: Path) -> None:
    if not torch_npu.npu.is_available():
        raise UserError("no NPU can be used: torch_npu finds none")
    vector_core.load(extension)


def computes() -> bool:
    """Returns whether kernels compute; they do not on a fake device."""
    return (torch.ones(3).to("npu") * 2).tolist() == [2, 2, 2]


def random_experts(shape: LayerShape, device: torch.device, in_planes: bool) -> AscendExperts:
    """Experts in which all nibbles are equally frequent, with results of about the size of x."""
    format, dtype = Format("q4", shape.group), getattr(torch, shape.dtype)
    experts = AscendExperts(shape.experts, shape.inner, shape.hidden, format, dtype, device, in_planes=in_planes)
    for matrices in (experts.w13, experts.w2):
        words, scales = matrices.storages
        if words.dtype == torch.uint8:
            words.random_(0, 255)
        else:
            words.random_(-(1 << 31), (1 << 31) - 1)
        size = 1 / (NIBBLE * math.sqrt(matrices.columns))
        scales.uniform_(0.5 * size, 1.5 * size)
        if matrices.planes is not None:
            scales[..., matrices.planes.groups :] = 0
    return experts


def layer(
    experts: AscendExperts, plain: AscendExperts, shape: LayerShape, batch: int, device: torch.device
) -> LayerInputs:
    """A layer with tokens that choose their experts evenly, each expert at most once."""
    ids = torch.rand(batch, shape.experts).topk(shape.top_k).indices.int()
    weights = torch.rand(batch, shape.top_k).softmax(-1)
    x = torch.randn(batch, shape.hidden).to(getattr(torch, shape.dtype))
    nbytes = experts.nbytes / experts.count * len(ids.unique())
    return LayerInputs(experts, plain, x.to(device), ids.to(device), weights.to(x).to(device), nbytes, shape.float_sums)


def check(layers: Sequence[LayerInputs]) -> None:
    for number, layer in enumerate(layers):
        custom, reference = layer.custom().float(), layer.unpacked().float()
        error = ((custom - reference).norm() / reference.norm()).item()
        if not error <= BOUND:  # NaN is an error too
            raise UserError(f"layer {number}: the kernels' results differ by {error:.3g} of their norm, above {BOUND}")


class Graph:
    """A graph of all calls, in order. Their results live as long as the graph."""

    def __init__(self, calls: Iterable[Callable[[], Tensor]]):
        self.graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(self.graph):
            self.results = [call() for call in calls]

    def replay(self) -> None:
        self.graph.replay()


def alternate(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each on the device, measured in turn; one round before is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            begin, end = torch_npu.npu.Event(enable_timing=True), torch_npu.npu.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def measure(shape: LayerShape, batches: Sequence[int], rounds: int, read_bytes: int) -> Iterator[Row]:
    """Yields a row for each batch, or none on a device that computes nothing."""
    torch.manual_seed(0)
    device = torch.device("npu", torch_npu.npu.current_device())
    real = computes()
    every = [(random_experts(shape, device, True), random_experts(shape, device, False)) for _ in range(shape.layers)]
    source = torch.ones(read_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    for batch in batches:
        layers = [layer(*experts, shape, batch, device) for experts in every]
        if real:
            check(layers)
        runs: dict[str, Callable[[], object]] = {
            "ref": Graph(layer.reference for layer in layers).replay,
            "custom": Graph(layer.custom for layer in layers).replay,
            "copy": lambda: target.copy_(source),
            "sum": source.sum,
        }
        us = alternate(runs, rounds)
        if real:
            mean = sum(layer.nbytes for layer in layers) / shape.layers
            ref, custom = us["ref"] / shape.layers, us["custom"] / shape.layers
            limit = max(2 * read_bytes / us["copy"], read_bytes / us["sum"]) / 1e3
            yield dict(
                batch=batch,
                ref_us=ref,
                custom_us=custom,
                ref_gbps=mean / ref / 1e3,
                custom_gbps=mean / custom / 1e3,
                speed_up=ref / custom,
                limit_gbps=limit,
                fraction=mean / custom / 1e3 / limit,
            )
