"""A row of the table of families, and the sizes and helpers that most rows share."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.models.family_mistakes import Mistake
from umbra.models.rope import RopeConfig

Sizes = Mapping[str, Any]  # keys of a config.json; None: the family's config has no such key

SIZES: Sizes = (
    dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8)
    | dict(num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16)
    | dict(max_position_embeddings=256, rope_theta=10000.0, norm_topk_prob=True, eos_token_id=0)
    | dict(initializer_range=0.3)  # larger than usual: routing and attention are far from uniform
)
NO_EXPERTS: dict[str, Any] = dict.fromkeys(
    ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
)
ASCEND_SIZES: Sizes = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)


def spread(model: PreTrainedModel, scores: float = 5.0) -> None:
    """Makes random what transformers starts at one or zero. `scores`: the mean of a bias that only chooses experts:
    bfloat16 has steps of 0.03 there."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or "bias" in name or "sinks" in name:
            tensor.add_(torch.randn_like(tensor) * 0.2 + scores * ("e_score" in name))


@dataclass(frozen=True)
class Row:
    """A family as the tests know it. `tests.families` lists what each field is used for."""

    name: str  # its folder in models/, and the `model_type` of its checkpoints
    config: type[PretrainedConfig]
    model: type[PreTrainedModel]  # transformers' model, the oracle
    sizes: Sizes  # of the tiny model
    randomise: Callable[[PreTrainedModel], None] = spread
    seed: int = 5
    nullable: Sequence[str] = ("q_lora_rank",)  # keys that a config may have without a value
    publish: Callable[[dict[str, Any]], None] | None = None  # rewrites transformers' config.json as hubs have it
    rename: Callable[[str], str] | None = None  # names of tensors as hubs have them, by those that transformers writes
    variants: Mapping[str, Sizes] = field(default_factory=dict)  # beside "tiny": what differs
    mistakes: Mapping[str, Mistake] = field(default_factory=dict)  # by name, with " VARIANT" where it is not "tiny"
    refused: Sequence[tuple[Sizes, str]] = ()  # changes of config.json, each with a pattern of the complaint
    # Folders of checkpoints/, billions of elements, rotation, and columns of a head's query.
    official: Sequence[tuple[str, float, RopeConfig, int]] = ()
    last: str = "shared_expert"  # part of the name of a tensor whose absence must be noticed
    splits: Mapping[str, tuple[Sizes, str]] = field(default_factory=dict)  # models, each with names of splits of it
    offload: Sizes | None = None  # sizes of the model that runs with shadow experts, if it does
    gguf: Sizes = field(default_factory=dict)  # what a GGUF file needs or cannot say
    gguf_wide: Sizes = field(default_factory=dict)  # what makes all matrices wide enough for blocks of 256
    kept: Sequence[tuple[str, str]] = ()  # types in a GGUF file, and the formats in which the CPU keeps them
    quantise: Sizes | None = None  # sizes that `umbra quantize` takes, if it knows the family's layers
    ascend: Sizes = field(default_factory=dict)  # sizes that the NPU's operators take, beside ASCEND_SIZES
    elsewhere: bool = True  # whether devices other than the CPU have its ops
    inner: str = "moe_intermediate_size"  # the key of an expert's width

    def __str__(self) -> str:
        return self.name

    def with_sizes(self, **options: Any) -> "Row":
        return replace(self, sizes={**self.sizes, **options})

    def save(self, folder: Path, published: bool = True, /, **options: Any) -> Any:
        """Saves a random model in float32 to `folder`, with the config of hubs or with transformers' own, and returns
        it in evaluation mode as the oracle."""
        torch.manual_seed(self.seed)
        sizes = {**self.sizes, **options}
        shards = {name: sizes.pop(name) for name in ("max_shard_size",) if name in sizes}
        given = {name: value for name, value in sizes.items() if value is not None or name in self.nullable}
        model = self.model(self.config(**given)).eval()
        with torch.no_grad():
            self.randomise(model)
        model.save_pretrained(folder, **shards)
        if self.publish and published:
            config = json.loads((folder / "config.json").read_text())
            self.publish(config)
            (folder / "config.json").write_text(json.dumps(config))
        if self.rename and published:
            path = folder / "model.safetensors"
            save_file({self.rename(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        return model

    def variant(self, name: str) -> Sizes:
        return {} if name == "tiny" else self.variants[name]

    def names(self) -> list[str]:
        return ["tiny", *self.variants]
