"""A tiny model on the real Ascend platform over the fake device."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tests.families import ROWS
from tests.families.row import ASCEND_SIZES
from tests.modelslim import modelslim_tiny
from tests.tiny import ONE_RANK, save_tiny_of, write_case
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
from umbra.ops.ascend.host_memory import pinned
from umbra.ops.ascend.shadow import Node, ShadowNodes


@dataclass(frozen=True)
class Family:
    """A tiny model of a row of the table of families, in sizes that the NPU's operators take."""

    name: str
    save: Callable[..., Any]
    sizes: dict[str, Any] = field(compare=False)

    def __str__(self) -> str:
        return self.name


def of_row(name: str, **more: Any) -> Family:
    return Family(name, partial(save_tiny_of, family=name), {**ASCEND_SIZES, **ROWS[name].ascend, **more})


QWEN3, M2, QWEN2, GLM, GPT_OSS = map(of_row, ("qwen3_moe", "minimax_m2", "qwen2_moe", "glm4_moe", "gpt_oss"))
V3, V2, FLASH, HYBRID = map(of_row, ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "qwen3_next"))
DENSE_HYBRID, LLAMA, MINISTRAL3, HY3, GEMMA4 = map(of_row, ("qwen3_5", "llama", "ministral3", "hy_v3", "gemma4"))
PROLOG = of_row(
    "deepseek_v3", hidden_size=1024, q_lora_rank=1536
)  # the fewest columns that one op takes before attention
SIZES = QWEN3.sizes


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
    node = make(nodes, tokens, layer)
    node.read = node.ids
    node.read.copy_(torch.arange(nodes.top_k, dtype=torch.int32).expand(tokens, -1))
    node.ids = pinned(node.read.shape, torch.int32, f"layer {layer}")
    return cast(Node, node)
