"""The platform's checks at its start, its requests for graphs, and its message when one is made again."""

from pathlib import Path

import pytest
import torch

from tests.ascend.engine import ascend_case, ascend_runner, prefilled
from umbra.base.errors import UserError
from umbra.executor.config.env import RankEnv
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.ascend.device import AscendPlatform
from umbra.executor.platform.ascend.graphs import compiler_config
from umbra.executor.platform.ascend.settings import AscendSettings


def test_a_rank_needs_a_device(tmp_path: Path) -> None:
    settings = platform_settings(ascend_case(tmp_path))
    devices = torch.npu.device_count()
    with pytest.raises(UserError, match=f"rank 90 needs NPU {devices}, this machine has {devices}"):
        AscendPlatform(settings, RankEnv(90, 99, devices, 99, ""))
    assert AscendPlatform(settings, RankEnv(90, 99, devices - 1, 99, "")).device == torch.device("npu", devices - 1)


@pytest.mark.parametrize(
    ("mode", "name"), [("ge_graph", "max-autotune"), ("acl_graph", "reduce-overhead"), ("npugraph_ex", "npugraph_ex")]
)
def test_graphs_are_asked_for_with_weights_that_stay(mode: str, name: str) -> None:
    config = compiler_config(mode, AscendSettings())
    assert config.mode.value == name
    options = config.experimental_config
    assert options.frozen_parameter
    assert bool(options.tiling_schedule_optimize) == (mode == "ge_graph")
    assert (options.topology_sorting_strategy.value == "StableRDFS") == (mode == "ge_graph")


@pytest.mark.parametrize("mode", ["acl_graph", "npugraph_ex"])
def test_only_the_newer_backend_is_told_of_kernels(mode: str) -> None:
    for wanted in (False, True):
        settings = AscendSettings(super_kernel=wanted, static_kernels=not wanted)
        graph = compiler_config(mode, settings).experimental_config.aclgraph
        newer = mode == "npugraph_ex"
        assert bool(graph._super_kernel_optimize) == (newer and wanted)
        assert bool(graph._aclnn_static_shape_kernel) == (newer and not wanted)


@pytest.mark.thorough
def test_a_graph_that_is_made_again_is_said(tmp_path: Path) -> None:
    """Dynamo guards a compiled step by the number of threads, among others."""
    torch._dynamo.reset()
    runner = ascend_runner(ascend_case(tmp_path, "exe_mode=acl_graph", "strict=true"), tmp_path)
    prefilled(runner)
    runner.loop.step()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(UserError, match="strict: true: the graph of 4 sequences was compiled again"):
            runner.loop.step()
    finally:
        torch.set_num_threads(threads)
