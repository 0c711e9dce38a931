"""tools/benchmarks/npu_gemv.py: its captures and replays on the fake NPU, which computes nothing, and its checks on the
CPU."""

import pytest
import torch

from ops.ascend.vector_core import calls
from tests.ascend import npu_on_cpu, umbra_on_cpu  # noqa: F401 (register)
from tests.ascend.extension import built, load_extension
from tests.ascend.log import device_log
from tools.benchmarks import npu_gemv, npu_layers
from tools.benchmarks.npu_layers import Layer, Shape, check, layer, random_experts
from umbra.errors import UserError

SMALL = Shape(hidden=128, inner=64, experts=8, top_k=2, group=32, layers=16, dtype="bfloat16")
FLAGS = ["--hidden=128", "--inner=64", "--experts=8", "--top-k=2", "--read-mb=1", "--rounds=3", "--batches", "1", "4"]
CPU = torch.device("cpu")


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


@pytest.fixture
def layers() -> list[Layer]:
    torch.manual_seed(0)
    return [layer(random_experts(SMALL, CPU, True), random_experts(SMALL, CPU, False), SMALL, 4, CPU) for _ in range(2)]


def test_bytes_are_those_of_the_experts_that_are_hit(layers: list[Layer]) -> None:
    one = 64 * 128 * 3 / 2 + 2 * 128 * 8 * 2  # nibbles, eight scales in bfloat16 for each of 128 columns of both
    for each in layers:
        hit = len(set(each.ids.flatten().tolist()))
        assert 2 <= hit < 8
        assert each.nbytes == hit * one


def test_equal_results_pass_and_others_do_not(layers: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    check(layers)
    assert all(0.3 < each.custom().float().pow(2).mean() ** 0.5 < 3 for each in layers)  # neither lost nor overflown
    real = calls.moe
    for factor in (1.05, float("nan")):
        monkeypatch.setattr(calls, "moe", lambda *given, by=factor: real(*given) * by)
        with pytest.raises(UserError, match="layer 0: the kernels' results differ by"):
            check(layers)


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the device computes and takes some time."""
    monkeypatch.setattr(npu_layers, "computes", lambda: True)
    monkeypatch.setattr(npu_layers, "check", lambda layers: None)
    monkeypatch.setattr(npu_layers, "alternate", lambda *_: {"ref": 320.0, "custom": 80.0, "copy": 3.0, "sum": 1.0})
    load_extension()
    (row,) = npu_layers.measure(SMALL, [1], 3, 1 << 20)
    nbytes = 2 * (64 * 128 * 3 / 2 + 2 * 128 * 8 * 2)
    assert (row["batch"], row["ref_us"], row["custom_us"], row["speed_up"]) == (1, 20, 5, 4)
    assert row["custom_gbps"] == pytest.approx(nbytes / 5e-6 / 1e9)
    assert row["limit_gbps"] == pytest.approx((1 << 20) / 1e-6 / 1e9)  # the sum's: 1 us beside 2 MiB in 3 us
    assert row["fraction"] == pytest.approx(row["custom_gbps"] / row["limit_gbps"])
