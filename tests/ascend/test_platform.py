"""What the platform checks when it starts, how graphs are asked for, and what is said when one is made again."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from executor.config.env import RankEnv
from executor.launch.platform_settings import platform_settings
from executor.platform.ascend import device
from executor.platform.ascend.device import AscendPlatform
from executor.platform.ascend.graphs import AscendGraph, AscendGraphs, compiler_config
from models.batch import Batch
from ops.interface import Paged
from tests.ascend.engine import ascend_case
from umbra.errors import UserError

WITHOUT = SimpleNamespace(super_kernel=False, static_kernels=False)


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
    config = compiler_config(mode, cast(Any, WITHOUT))
    assert config.mode.value == name
    found = config.experimental_config
    assert found.frozen_parameter
    assert bool(found.tiling_schedule_optimize) == (mode == "ge_graph")
    assert (found.topology_sorting_strategy.value == "StableRDFS") == (mode == "ge_graph")


@pytest.mark.parametrize("wanted", ["super_kernel", "static_kernels"])
def test_only_the_newer_backend_is_told_of_kernels(wanted: str) -> None:
    for mode in ("acl_graph", "npugraph_ex"):
        options = compiler_config(mode, cast(Any, SimpleNamespace(**vars(WITHOUT) | {wanted: True})))
        graph = options.experimental_config.aclgraph
        newer = mode == "npugraph_ex"
        assert bool(graph._super_kernel_optimize) == (newer and wanted == "super_kernel")
        assert bool(graph._aclnn_static_shape_kernel) == (newer and wanted == "static_kernels")


NONE = torch.empty(0)


def batch_of(lengths: tuple[int, ...]) -> Batch:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Batch)}
    return Batch(
        **fields | {"token_ids": torch.zeros(len(lengths), dtype=torch.long), "paged": Paged(NONE, NONE, (), lengths)}
    )


@pytest.mark.parametrize("on_device", [False, True])
def test_lengths_are_a_tensor_only_where_they_are_read_on_the_device(on_device: bool) -> None:
    graph = AscendGraph.__new__(AscendGraph)
    graph.lengths_on_device = on_device
    batch = batch_of((3, 5))
    prepared = graph.prepared(batch)
    assert isinstance(prepared.paged.kv_lens, torch.Tensor) == on_device
    assert list(prepared.paged.kv_lens) == [3, 5]
    assert prepared.token_ids is batch.token_ids


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_graph_that_is_made_again_is_said(strict: bool, again: bool, capsys: pytest.CaptureFixture[str]) -> None:
    graphs: Any = AscendGraphs.__new__(AscendGraphs)
    graphs.settings, graphs.compiles = SimpleNamespace(strict=strict), 3

    def run(batch: Batch) -> str:
        graphs.compiles += again
        return f"logits of {len(batch.token_ids)}"

    graphs.graphs = {2: run}
    graphs._first = lambda rows, batch: f"first of {rows}"
    if strict and again:
        with pytest.raises(UserError, match="strict: true: the graph of 2 sequences was compiled again"):
            graphs(batch_of((1, 1)))
    else:
        assert graphs(batch_of((1, 1))) == "logits of 2"
        said = "WARNING: the graph of 2 sequences was compiled again (--set strict=true makes this an error)\n"
        assert capsys.readouterr().out == said * again
    assert graphs(batch_of((1,))) == "first of 1"


@pytest.mark.parametrize(("prefetch", "ranks", "read"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_attention_is_read_ahead_by_several_ranks(
    prefetch: bool, ranks: int, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        def step(self) -> None: ...

    asked: list[object] = []
    monkeypatch.setattr(device, "prefetch_attention", asked.append)
    monkeypatch.setattr(device, "AscendGraphs", lambda *given: given)
    own: Any = AscendPlatform.__new__(AscendPlatform)
    own.settings = SimpleNamespace(ascend=SimpleNamespace(prefetch=prefetch))
    own.ranks, own.device, own.communicator = SimpleNamespace(world_size=ranks), "npu:0", "name"
    model = Model()
    made: Any = own.compile(model.step, "config")
    assert made == (model.step, own.settings, own.ranks, "npu:0", "config", "name")
    assert asked == ([model] if read else [])


@pytest.mark.parametrize("rows", ["", "gathered (one rank)"])
def test_a_model_is_checked_before_its_kernels_are_named(monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    checked: list[Any] = []
    platform: Any = AscendPlatform.__new__(AscendPlatform)
    platform.settings, platform.cann, platform.can, platform.rows = "settings", "8.5.0", "can", rows
    monkeypatch.setattr(device, "check_offsets", lambda *given: checked.append(given))
    monkeypatch.setattr(device, "chosen_kernels", lambda *given: {"decode": given[:2]})
    monkeypatch.setattr(device, "cache_line", lambda can: {"cache": can})
    said = {"rows of experts on other ranks": rows} if rows else {}
    assert platform.kernels("model") == {"decode": ("model", "settings"), "cache": "can", **said}
    assert checked == [("model", "settings", "8.5.0")]
