"""tools/benchmarks/npu_gemv.py: its captures and replays on the fake NPU, which computes nothing, and its checks on the
CPU."""

import pytest
import torch

from tests.ascend import npu_on_cpu, umbra_on_cpu  # noqa: F401 (register)
from tests.ascend.extension import built
from tests.ascend.log import device_log
from tools.benchmarks import npu_gemv
from umbra.errors import UserError

FLAGS = ["--hidden=128", "--inner=64", "--experts=8", "--top-k=2", "--read-mb=1", "--rounds=3", "--batches", "1", "4"]


def test_each_way_is_one_graph_of_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with device_log() as log:
        npu_gemv.main(FLAGS, built())
    graphs: dict[str, list[str]] = {}  # what was captured, by graph
    for line in log.lines:
        if line.startswith("capture begin"):
            graphs[name := line.removeprefix("capture begin ")] = []
        elif line.startswith("captured"):
            graphs[name].append(line.split()[1])
    assert len(graphs) == 4  # two ways for each of two batches
    ref, custom = list(graphs.values())[:2]
    assert custom == ["aclnnUmbraFusedMoeW4a16"] * 16
    assert [ref.count(kernel) for kernel in ("aclnnGroupedMatmulV5", "aclnnUmbraFusedMoeW4a16")] == [32, 0]
    assert list(graphs.values())[3] == custom
    replays = [line.removeprefix("replay ") for line in log.lines if line.startswith("replay")]
    one, two, three, four = graphs
    assert replays == [one, two] * 4 + [three, four] * 4  # in turn, one round before what counts
    # Between two replays stand the plain reads, and nothing of the layers.
    first, last = (log.lines.index(f"replay {graph}") for graph in (one, three))
    eager = {line.split()[0] for line in log.lines[first:last] if line.startswith("aclnn")}
    assert not {kernel for kernel in eager if "Moe" in kernel or "Grouped" in kernel} - {"aclnnMoeInitRoutingV2"}
    assert "nothing to measure" in capsys.readouterr().out


def test_without_kernels_it_refuses() -> None:
    with pytest.raises(UserError, match=r"not built: run bash ops/ascend/vector_core/build\.sh"):
        npu_gemv.main([])


def test_without_an_npu_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    with pytest.raises(UserError, match="no NPU can be used: torch_npu finds none"):
        npu_gemv.main([], built())
