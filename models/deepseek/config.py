"""The config.json of models with attention over latents, checked: DeepSeek-V2 and V2-Lite; DeepSeek-V3, V3.1 and R1,
Kimi-K2, what reads text in Kimi-K2.5, and Moonlight; GLM-4.7-Flash."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from umbra.models.config import LARGEST_DEPTH
from umbra.models.hf_config import HfConfig, read_hf_config
from umbra.models.latent_config import LatentDecoderConfig
from umbra.models.moe_config import check_routing, read_sizes, sparse_by_types
from umbra.models.mtp_names import MtpNames
from umbra.models.rope import read_rope

V3_SIZES = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
EXPERTS = "n_routed_experts"
MTP = MtpNames("model.layers.{}", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", "shared_head.head")
MOST_GROUPS = 64
Own = TypeVar("Own", bound="LatentMoeConfig")


@dataclass(frozen=True)
class LatentMoeConfig(LatentDecoderConfig):
    sizes: ClassVar[dict[str, int]] = V3_SIZES
    scoring: ClassVar[str] = "sigmoid"
    methods: ClassVar[tuple[str, ...]] = ("noaux_tc",)  # values of topk_method, of which the last has groups
    dense: ClassVar[int] = 3  # first layers that are
    mtp_layers: ClassVar[int] = 1

    @classmethod
    def from_folder(cls: type[Own], folder: Path) -> Own:
        hf = read_hf_config(folder).text
        hf.refuse("hidden_act", "silu")
        hf.refuse("scoring_func", cls.scoring)
        hf.refuse("attention_bias", False)
        hf.refuse("rope_interleave", True)
        hf.refuse("moe_layer_freq", 1)
        hf.refuse("topk_method", *cls.methods)
        sizes = read_sizes(hf, cls.sizes, (EXPERTS, "num_local_experts", "num_experts"))
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": 1}
        grouped = hf.value("topk_method", default=cls.methods[0]) == cls.methods[-1]
        groups = hf.size("n_group", default=1, maximum=MOST_GROUPS) if grouped else 1
        if sizes["num_experts"] % groups:
            raise hf.error("n_group", f"does not divide {EXPERTS}: {sizes['num_experts']}")
        compressed = hf.data.get("q_lora_rank", 0) is not None
        config = cls(
            **sizes,
            q_lora_rank=hf.size("q_lora_rank") if compressed else 0,
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
            rope=read_rope(hf, sizes["qk_rope_head_dim"], sizes["max_position_embeddings"]),
            norm_topk_prob=hf.flag("norm_topk_prob", cls.scoring == "sigmoid"),
            sparse_layers=cls._sparse(hf, sizes["num_hidden_layers"]),
            routed_scaling_factor=hf.number("routed_scaling_factor", default=1.0),
            n_group=groups,
            topk_group=hf.size("topk_group", default=groups, maximum=groups) if groups > 1 else 1,
            num_nextn_predict_layers=hf.size(
                "num_nextn_predict_layers", "num_mtp_layers", default=cls.mtp_layers, minimum=0, maximum=LARGEST_DEPTH
            ),
        )
        check_routing(hf, config, EXPERTS)
        if config.num_experts_per_tok > config.num_experts // groups * config.topk_group:
            raise hf.error("topk_group", f"groups have fewer than num_experts_per_tok: {config.num_experts_per_tok}")
        return config

    @classmethod
    def _sparse(cls, hf: HfConfig, layers: int) -> tuple[bool, ...]:
        dense = hf.size("first_k_dense_replace", default=cls.dense, minimum=0, maximum=LARGEST_DEPTH)
        return tuple(layer >= dense for layer in range(layers))


class DeepseekV3Config(LatentMoeConfig):
    """Also Kimi-K2's and Moonlight's."""


class DeepseekV2Config(LatentMoeConfig):
    sizes = V3_SIZES | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
    }
    scoring, methods, dense, mtp_layers = "softmax", ("greedy", "group_limited_greedy"), 0, 0

    @classmethod
    def from_folder(cls, folder: Path) -> "DeepseekV2Config":
        read_hf_config(folder).refuse("norm_topk_prob", False)
        return super().from_folder(folder)


class Glm4MoeLiteConfig(LatentMoeConfig):
    sizes = V3_SIZES | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    }
    dense = 1

    @classmethod
    def _sparse(cls, hf: HfConfig, layers: int) -> tuple[bool, ...]:
        return sparse_by_types(hf, layers, cls.dense)
