"""The config.json of decoders whose layers are grouped-query attention and a dense MLP, checked: Qwen3, Qwen2, Llama,
Mistral, Ministral and Ministral 3."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from umbra.models.dense_config import DenseConfig, read_sizes
from umbra.models.hf_config import HfConfig, read_hf_config
from umbra.models.rope import RopeConfig, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = "default", "yarn", "llama3", "longrope"
Own = TypeVar("Own", bound="DenseModelConfig")


@dataclass(frozen=True)
class DenseModelConfig(DenseConfig):
    """Subclasses say what differs between the families: sizes that a config without the keys has, and which keys there
    are."""

    qkv_bias: bool
    out_bias: bool  # of the projection back from attention
    mlp_bias: bool
    sliding_window: int  # 0: no layer has one
    sliding_layers: tuple[bool, ...]  # for each layer whether a token sees a window

    sizes: ClassVar[dict[str, int]]
    eps: ClassVar[float] = 1e-6
    normed: ClassVar[bool] = False  # whether each head of queries and keys has a norm
    window: ClassVar[int] = 0  # that of a config without the key

    @classmethod
    def from_folder(cls: type[Own], folder: Path) -> Own:
        hf = read_hf_config(folder).text
        hf.refuse("hidden_act", "silu")
        heads = hf.size("num_attention_heads", default=cls.sizes["num_attention_heads"])
        sizes = read_sizes(hf, {"num_key_value_heads": heads, **cls.sizes})
        window = cls._window(hf)
        return cls(
            **sizes,
            rms_norm_eps=hf.number("rms_norm_eps", default=cls.eps),
            rope=cls._rope(hf, sizes["head_dim"], sizes["max_position_embeddings"]),
            qkv_bias=cls._bias(hf),
            out_bias=hf.flag("attention_bias", False),
            mlp_bias=hf.flag("mlp_bias", False),
            sliding_window=window,
            sliding_layers=cls._sliding(hf, sizes["num_hidden_layers"], window),
        )

    @classmethod
    def _rope(cls, hf: HfConfig, head_dim: int, positions: int) -> RopeConfig:
        return read_rope(hf, head_dim, positions, kinds=KINDS)

    @classmethod
    def _bias(cls, hf: HfConfig) -> bool:
        return hf.flag("attention_bias", False)

    @classmethod
    def _window(cls, hf: HfConfig) -> int:
        """Returns the window: the key's, which may be null for none, or the one of a config without the key."""
        window = "sliding_window"
        return hf.size(window, default=0, minimum=0) if window in hf.data else cls.window

    @classmethod
    def _sliding(cls, hf: HfConfig, layers: int, window: int) -> tuple[bool, ...]:
        """Returns `sliding_layers`: the window is that of all layers."""
        return (window > 0,) * layers

    @classmethod
    def _by_types(cls, hf: HfConfig, layers: int, window: int, usual: tuple[str, ...]) -> tuple[bool, ...]:
        """Returns `sliding_layers` as `layer_types` says, or as `usual` where the key is missing."""
        kinds = hf.names("layer_types") or usual
        if len(kinds) != layers or set(kinds) - {FULL, SLIDING} or (SLIDING in kinds and not window):
            allowed = f"{FULL} or {SLIDING}" if window else FULL
            raise hf.error("layer_types", f"must be {layers} times {allowed}")
        return tuple(kind == SLIDING for kind in kinds)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if sliding else None for sliding in self.sliding_layers)


class Qwen3Config(DenseModelConfig):
    sizes: ClassVar[dict[str, int]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    }
    normed = True

    @classmethod
    def _window(cls, hf: HfConfig) -> int:
        return hf.size("sliding_window", default=4096) if hf.flag("use_sliding_window", False) else 0

    @classmethod
    def _sliding(cls, hf: HfConfig, layers: int, window: int) -> tuple[bool, ...]:
        first = hf.size("max_window_layers", default=28, minimum=0)
        return cls._by_types(
            hf, layers, window, tuple(SLIDING if window and i >= first else FULL for i in range(layers))
        )


class Qwen2Config(Qwen3Config):
    sizes: ClassVar[dict[str, int]] = {name: size for name, size in Qwen3Config.sizes.items() if name != "head_dim"}
    normed = False

    @classmethod
    def _bias(cls, hf: HfConfig) -> bool:
        hf.refuse("attention_bias", False)
        return True


class LlamaConfig(DenseModelConfig):
    sizes: ClassVar[dict[str, int]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }

    @classmethod
    def _window(cls, hf: HfConfig) -> int:
        return 0


class MistralConfig(DenseModelConfig):
    sizes: ClassVar[dict[str, int]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    window = 4096


class MinistralConfig(MistralConfig):
    @classmethod
    def _sliding(cls, hf: HfConfig, layers: int, window: int) -> tuple[bool, ...]:
        return cls._by_types(hf, layers, window, (SLIDING if window else FULL,) * layers)


class Ministral3Config(DenseModelConfig):
    sizes = MistralConfig.sizes | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
    }
    eps = 1e-5

    @classmethod
    def _rope(cls, hf: HfConfig, head_dim: int, positions: int) -> RopeConfig:
        rope = super()._rope(hf, head_dim, positions)
        if not rope.yarn or not rope.query_beta:
            raise hf.error("rope_parameters", "must be of type yarn, with llama_4_scaling_beta")
        return rope
