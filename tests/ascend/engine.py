"""A tiny model on the real Ascend platform over the fake device."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tests.modelslim import modelslim_tiny
from tests.tiny import ONE_RANK, save_tiny, save_tiny_m2, save_tiny_of, write_case
from tests.variants import thorough_but
from umbra.cpu_offload.costs import Costs, Line
from umbra.cpu_offload.expert_ring import ExpertRing
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.executor.platform.ascend.shadow_device import AscendDevice
from umbra.executor.platform.base import Platform
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.deepseek.config import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig
from umbra.models.deepseek.model import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM
from umbra.models.glm4_moe.config import Glm4MoeConfig
from umbra.models.glm4_moe.model import Glm4MoeForCausalLM
from umbra.models.gpt_oss.config import GptOssConfig
from umbra.models.gpt_oss.model import GptOssForCausalLM
from umbra.models.minimax_m2.config import MiniMaxM2Config
from umbra.models.minimax_m2.model import MiniMaxM2ForCausalLM
from umbra.models.qwen2_moe.config import Qwen2MoeConfig
from umbra.models.qwen2_moe.model import Qwen2MoeForCausalLM
from umbra.models.qwen3_moe.config import Qwen3MoeConfig
from umbra.models.qwen3_moe.model import Qwen3MoeForCausalLM
from umbra.models.qwen3_next.config import Qwen3NextConfig
from umbra.models.qwen3_next.model import Qwen3NextForCausalLM
from umbra.ops.ascend.host_memory import pinned
from umbra.ops.ascend.shadow import Node, ShadowNodes


@dataclass(frozen=True)
class Family:
    """A tiny model of a family. Sizes that families have in common are the same."""

    name: str
    save: Callable[..., Any]
    sizes: dict[str, Any] = field(compare=False)
    inner: str  # the name of the width of an expert
    config: Any
    model: Any

    def __str__(self) -> str:
        return self.name


SIZES = dict(hidden_size=128, head_dim=128, num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=64)
# head_dim 64: the narrowest that the rotary op takes
M2_SIZES = dict(
    hidden_size=128,
    head_dim=64,
    rotary_dim=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    num_hidden_layers=2,
    num_local_experts=8,
    num_experts_per_tok=3,
    vocab_size=96,
    initializer_range=0.2,
)
QWEN3 = Family("qwen3_moe", save_tiny, SIZES, "moe_intermediate_size", Qwen3MoeConfig, Qwen3MoeForCausalLM)
M2 = Family("minimax_m2", save_tiny_m2, M2_SIZES, "intermediate_size", MiniMaxM2Config, MiniMaxM2ForCausalLM)
QWEN2 = Family(
    "qwen2_moe",
    partial(save_tiny_of, family="qwen2_moe"),
    SIZES | {"shared_expert_intermediate_size": 64},
    "moe_intermediate_size",
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
GLM = Family(
    "glm4_moe",
    partial(save_tiny_of, family="glm4_moe"),
    SIZES | {"first_k_dense_replace": 0},
    "moe_intermediate_size",
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)
OSS_SIZES = dict(hidden_size=128, head_dim=64, intermediate_size=64, num_hidden_layers=2)
GPT_OSS = Family(
    "gpt_oss", partial(save_tiny_of, family="gpt_oss"), OSS_SIZES, "intermediate_size", GptOssConfig, GptOssForCausalLM
)

# The only widths of latents and rotated keys that Ascend takes.
LATENT_SIZES = dict(
    hidden_size=128,
    num_attention_heads=2,
    num_key_value_heads=2,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=96,
    first_k_dense_replace=0,
)
V3 = Family(
    "deepseek_v3",
    partial(save_tiny_of, family="deepseek_v3"),
    LATENT_SIZES,
    "moe_intermediate_size",
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
# The fewest columns that one op takes before attention.
PROLOG = dataclasses.replace(
    V3, save=partial(save_tiny_of, family="deepseek_v3"), sizes=LATENT_SIZES | dict(hidden_size=1024, q_lora_rank=1536)
)
V2 = Family(
    "deepseek_v2",
    partial(save_tiny_of, family="deepseek_v2"),
    LATENT_SIZES,
    "moe_intermediate_size",
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
)
# Heads that are no power of two.
FLASH_SIZES = LATENT_SIZES | dict(
    num_attention_heads=6,
    num_key_value_heads=6,
    qk_nope_head_dim=192,
    v_head_dim=256,
    first_k_dense_replace=None,
    intermediate_size=64,
)
FLASH = Family(
    "glm4_moe_lite",
    partial(save_tiny_of, family="glm4_moe_lite"),
    FLASH_SIZES,
    "moe_intermediate_size",
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

# Heads of 256, of which 64 columns rotate; a layer with states, then one that attends.
HYBRID_SIZES = dict(
    hidden_size=128,
    head_dim=256,
    num_attention_heads=2,
    num_key_value_heads=1,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=96,
    layer_types=["linear_attention", "full_attention"],
    num_hidden_layers=2,
)
HYBRID = Family(
    "qwen3_next",
    partial(save_tiny_of, family="qwen3_next"),
    HYBRID_SIZES,
    "moe_intermediate_size",
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


def in_int8(family: Family) -> Family:
    """The same, saved as modelslim quantises it."""

    def save_as_int8(folder: Path, **sizes: Any) -> None:
        plain = folder.with_name(f"{folder.name}-plain")
        family.save(plain, **sizes)
        modelslim_tiny(plain, folder, lambda module: "W8A8_DYNAMIC")

    return dataclasses.replace(family, save=save_as_int8)


SECOND_THOROUGH = thorough_but((QWEN3, M2), QWEN3)  # of costly tests
CAPTURE_MODES = thorough_but(["acl_graph", "npugraph_ex"], "acl_graph")  # of costly tests
PROMPTS = [[5, 17, 3, 88], [7], list(range(30, 53))]


def ascend_case(folder: Path, *overrides: str, family: Family = QWEN3, **sizes: Any) -> Case:
    """A case of bfloat16 for a model of two layers; both are written to `folder` by the first call."""
    path = folder / f"{folder.name}.yaml"
    if not path.exists():
        family.save(folder / "model", **family.sizes | sizes)
        data = {"prompts": ["x"], "input_max_len": 48, "max_new_tokens": 6, "batch_size": 4}
        write_case(
            path,
            folder / "model",
            model_name=family.name,
            platform="ascend",
            model_config={"dtype": "bfloat16"},
            cache_config={"page_size": 128},
            data_config=data,
        )
    return load_case(str(path), ["ignore_eos=true", *overrides])


def ascend_runner(case: Case, folder: Path, ranks: RankEnv = ONE_RANK) -> ModelRunner:
    """A runner of `case` on the fake NPU; compiled graphs that it keeps are in `folder`/cache."""
    from umbra.executor.platform.ascend.device import AscendPlatform

    def make_platform(settings: PlatformSettings, ranks: RankEnv) -> Platform:
        return AscendPlatform(dataclasses.replace(settings, graphs=settings.graphs and folder / "cache"), ranks)

    runner = make_runner(case, folder, ranks)
    runner.setup(make_platform)
    return runner


def value_copies(runner: ModelRunner, copy: float) -> ExpertRing:
    """Makes a copy of an expert cost `copy`, and an expert on the CPU 1 and .1 for each of its pairs, in long steps."""
    assert runner.engine.shadows
    device = runner.engine.shadows.device
    assert isinstance(device, AscendDevice)
    assert device.long
    device.long.ring.costs = Costs(0, Line(0, 0, 0), Line(0, 1, 0.1), 0, copy, 1, (1, 1), 0)
    return device.long.ring


def generate(runner: ModelRunner, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    return runner.model_generate([("", ids) for ids in prompts])


def prefilled(runner: ModelRunner, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    """Sequences after their first token, ready to decode."""
    for i, ids in enumerate(prompts):
        runner.loop.submit(runner.request(i, ids, runner.case.data_config.max_new_tokens), i)
    running = runner.loop.scheduler.running
    while not running or not all(s.decoding for s in running):
        runner.loop.step()
        running = runner.loop.scheduler.running
    return running


def node(nodes: ShadowNodes, tokens: int, layer: int, make: Any = ShadowNodes.make_node) -> Node:
    """In place of `ShadowNodes.make_node`: the fake device's memory has no routing, so it is copied beside the buffer
    that the jobs read, in which each token goes to experts 0, 1, 2, ..."""
    made = make(nodes, tokens, layer)
    made.read = made.ids
    made.read.copy_(torch.arange(nodes.top_k, dtype=torch.int32).expand(tokens, -1))
    made.ids = pinned(made.read.shape, torch.int32, f"layer {layer}")
    return cast(Node, made)
