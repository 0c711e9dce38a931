"""Mistakes that implementations of residual streams, indexed attention and n-grams have made."""

import dataclasses
from typing import Any

import pytest

from tests.models.family_mistakes import Mistake
from tests.models.hybrid_mistakes import op
from umbra.models.layer_sizes import IndexSizes
from umbra.models.layers.delta_net import DeltaNet
from umbra.models.layers.ngram import NgramLayer
from umbra.ops import ngrams, selected, streams


def all_blocks(patch: pytest.MonkeyPatch) -> None:
    create = IndexSizes.__init__
    patch.setattr(IndexSizes, "__init__", lambda self, heads, width, ratio, top: create(self, heads, width, ratio, 500))


def silu_gate(patch: pytest.MonkeyPatch) -> None:
    create: Any = DeltaNet.__init__
    patch.setattr(DeltaNet, "__init__", lambda self, config, build, fused, sigmoid: create(self, config, build, fused))


def without_ngrams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NgramLayer, "forward", lambda self, carried, batch: carried)


def without_the_norms_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("umbra.models.layers.streams._fill", lambda weight, base, part: weight.copy_(part))


def close_taps(patch: pytest.MonkeyPatch) -> None:
    """A convolution without dilation."""
    create: Any = NgramLayer.__init__

    def changed(self: NgramLayer, build: Any, hidden: int, eps: float, count: int, sizes: Any, number: int) -> None:
        create(self, build, hidden, eps, count, dataclasses.replace(sizes), number)
        fill, weight = self.conv1d.pieces, self.conv1d.weight

        def pieces(path: str) -> Any:
            for piece in fill(path):
                yield dataclasses.replace(piece, fill=lambda x: weight.zero_()[-x.shape[2] :].copy_(x[:, 0].T))

        patch.setattr(self.conv1d, "pieces", pieces)

    patch.setattr(NgramLayer, "__init__", changed)


TURNED = "cos * back_cos + sin * back_sin, sin * back_cos - cos * back_sin"
MISTAKES: dict[str, Mistake] = {
    "all_blocks": all_blocks,
    "no_end_of_text": op("ngram_rows", (" | (before == table.end)", ""), of=ngrams),
    "silu_gate": silu_gate,
    "without_ngrams": without_ngrams,
    "close_taps": close_taps,
    "one_norm_over_streams": op("stream_norm", ("mean(-1, keepdim=True)", "mean((-2, -1), keepdim=True)"), of=streams),
    "without_the_norms_one": without_the_norms_one,
    "keys_at_blocks_ends": op("write_index", (TURNED, "cos, sin"), of=selected),
    "negative_scores": op("choose_blocks", ("F.relu(q[row].float() @ keys.T)", "q[row].float() @ keys.T"), of=selected),
    "without_the_tail": op("selected_attention", ("torch.cat((inside, ", "torch.cat((inside[:-2], "), of=selected),
    "result_once": op("gated_write", ("2 * (logits", "(logits"), of=streams),
}
