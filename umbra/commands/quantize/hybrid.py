"""The particulars of layers of Qwen3-Next, and of Qwen3.5-MoE and 3.6, with gated DeltaNet or attention."""

from collections.abc import Collection, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from umbra.commands.quantize.layer import LayerMath, Weights
from umbra.commands.quantize.workers import Each
from umbra.models.batch import Batch
from umbra.models.build import Build, Formats
from umbra.models.hybrid_config import HybridConfig
from umbra.models.layers.base import layers_of
from umbra.models.layers.delta_net import DeltaNet
from umbra.ops import load_ops
from umbra.ops.format import FORMATS
from umbra.ops.interface import Recurrent, fixed
from umbra.ops.parallel.groups import Parallel
from umbra.ops.reference import route_softmax

LINEAR = "linear_attn"
PLAIN = FORMATS["float32"]


class HybridLayer(LayerMath[HybridConfig]):
    matrices = ("gate_proj", "up_proj", "down_proj")
    router = "mlp.gate"
    shared, shared_gate = "mlp.shared_expert", "mlp.shared_expert_gate"
    small = tuple(f"{LINEAR}.{name}" for name in ("in_proj_ba", "in_proj_a", "in_proj_b"))
    fp8_name = "e4m3"
    norm_base = 1.0

    @classmethod
    def not_fp8(cls, config: HybridConfig) -> list[str]:
        names = (cls.router, cls.shared_gate, *cls.small)
        return ["lm_head", *(f"model.layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in names)]

    def __init__(self, config: HybridConfig, names: Collection[str], length: int):
        super().__init__(config, names, length)
        projections = [name for name in names if name.startswith(f"{LINEAR}.in_proj_")]
        self.inputs = projections or self.inputs

    def choose(self, w: Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
        return route_softmax(logits, self.config.num_experts_per_tok, self.config.norm_topk_prob)

    def queries(self, w: Weights, x: Tensor) -> tuple[Tensor, Tensor | None]:
        both = self.linear(w, "self_attn.q_proj", x).unflatten(-1, (-1, 2, self.config.head_dim))
        return both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2)

    def attentions(self, candidates: Iterable[Weights], x: Tensor, each: Each) -> Iterator[Tensor]:
        if f"{LINEAR}.A_log" not in self.names:
            return super().attentions(candidates, x, each)
        return each(partial(self._mixed, x), candidates)

    def _mixed(self, x: Tensor, w: Weights) -> Tensor:
        windows, length, _ = x.shape
        build = Build(
            load_ops("reference"),
            Parallel(),
            Formats(PLAIN, PLAIN, PLAIN),
            torch.float32,
            torch.device("cpu"),
            max_positions=1,
        )
        mixer = DeltaNet(self.config, build, f"{LINEAR}.in_proj_qkvz.weight" in self.names)
        for path, layer in layers_of(mixer):
            for piece in layer.pieces(f"{LINEAR}.{path}"):
                if piece.fill:
                    piece.fill(w(piece.name)[piece.part])
        delta, conv, inputs = (fixed(torch.empty(1, *shape)) for shape in mixer.states.shapes)
        mixer.states.bind(0, delta, conv, inputs)
        none = torch.zeros(1, windows, dtype=torch.int32)
        places = Recurrent(torch.arange(windows + 1) * length, none - 1, none - 1, none, none, none)
        rows = x.flatten(0, 1)
        batch = Batch(rows[:, 0], rows[:, 0], (), None, None, recurrent=places)
        return mixer(rows, rows, rows, batch).view_as(x)
