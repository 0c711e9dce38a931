"""The config.json of Qwen4-Exp, of models that read text or also see pictures, as one checked dataclass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.models.hf_config import HfConfig, read_hf_config
from umbra.models.hybrid_config import HybridMoeConfig, read_hybrid, text_with_tied
from umbra.models.layer_sizes import IndexSizes, NgramSizes
from umbra.models.moe_config import check_routing

DEFAULTS = {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 512, "num_experts_per_tok": 10}
INDEX = "indexer_n_heads", "indexer_head_dim", "indexer_compress_ratio", "indexer_budget"
# Two names of the layers that attend: checkpoints have the first, transformers writes the second.
ATTENDING = "full_attention", "indexed_attention"
GATES = "silu", "swish", "sigmoid"


@dataclass(frozen=True)
class Qwen4ExpConfig(HybridMoeConfig):
    hc_count: int  # residual streams
    hc_lowrank: int
    sigmoid_gate: bool  # of linear attention, in place of silu
    index: IndexSizes
    ngrams: NgramSizes | None
    ngram_layers: tuple[int | None, ...]  # for each layer its number among those that read n-grams; None: it does not

    @classmethod
    def from_folder(cls, folder: Path) -> "Qwen4ExpConfig":
        hf, tied = text_with_tied(read_hf_config(folder))
        sizes = read_hybrid(hf, DEFAULTS, ATTENDING, GATES, rotary=1.0) | tied
        layers, ids = sizes["num_hidden_layers"], sorted(set(hf.sizes("ple_layer_ids")))
        if ids and not 1 <= ids[0] <= ids[-1] <= layers:
            raise hf.error("ple_layer_ids", f"must be numbers of layers from 1 to {layers}")
        config = cls(
            **sizes,
            norm_topk_prob=hf.flag("norm_topk_prob", True),
            hc_count=hf.size("hc_count", default=4, minimum=2, maximum=64),
            hc_lowrank=hf.size("hc_lowrank", default=320),
            sigmoid_gate=hf.value("output_gate_type") == "sigmoid",
            index=_read_index(hf, sizes),
            ngrams=_read_ngrams(hf, sizes) if ids else None,
            ngram_layers=tuple(ids.index(i + 1) if i + 1 in ids else None for i in range(layers)),
        )
        check_routing(hf, config, "num_experts")
        return config


def _read_index(hf: HfConfig, sizes: dict[str, Any]) -> IndexSizes:
    if hf.size("indexer_kv_heads", default=1) != 1:
        raise hf.error("indexer_kv_heads", "is not implemented, only 1")
    heads, width, ratio, budget = (hf.size(name) for name in INDEX)
    if budget % ratio:
        raise hf.error("indexer_budget", f"must be a multiple of indexer_compress_ratio: {ratio}")
    if not sizes["rope"].dim <= width <= sizes["head_dim"] or width % 2:
        raise hf.error(
            "indexer_head_dim",
            f"must be even, and from the columns that rotate, {sizes['rope'].dim}, to head_dim: {sizes['head_dim']}",
        )
    return IndexSizes(heads, width, ratio, budget // ratio)


def _read_ngrams(hf: HfConfig, sizes: dict[str, Any]) -> NgramSizes:
    if not sizes["eos_token_ids"]:
        raise hf.error("eos_token_id", "must be set where layers read n-grams")
    ngrams = NgramSizes(
        size=hf.size("ngram_size", default=3, minimum=2, maximum=8),
        heads=hf.size("heads_per_ngram", default=8, maximum=64),
        width=hf.size("ple_embed_dim", default=sizes["hidden_size"]),
        least=hf.size("ngram_vocab_size_base", default=20_000_000, maximum=1 << 28),
        multiple=hf.size("make_ngram_vocab_size_divisible_by", default=128),
        parts=hf.size("split_ngram_parts", default=512, maximum=1 << 16),
        taps=hf.size("ple_conv_kernel_size", default=4),
        seed=hf.size("seed", default=1234, minimum=0, maximum=1 << 62),
        end=sizes["eos_token_ids"][0],
        vocabulary=sizes["vocab_size"],
    )
    if ngrams.width % ((ngrams.size - 1) * ngrams.heads):
        raise hf.error("ple_embed_dim", f"must be a multiple of {(ngrams.size - 1) * ngrams.heads}, the rows read")
    return ngrams
