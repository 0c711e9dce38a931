"""What `umbra plan --cluster` prints, writes and draws, against what it did when it was last looked at. After a change
of what it says, UMBRA_PRINTED=write writes the new text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from planner import plan as module
from planner.plan import ClusterPlan, Found, lines_of, make_cluster_plan, row_of, show_cluster_plan
from planner.rates import points
from tests.planner.test_cluster import write
from umbra.errors import UserError

EXPECTED = Path(__file__).parents[1] / "data" / "cluster_plan.txt"
TARGETS = {"tpot_ms": 40, "ttft_ms": 90}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traffic that some layouts do not keep up with, and targets that some do not meet."""
    return write(
        tmp_path_factory.mktemp("plan"), targets=TARGETS, load={"rate": 14, "prompt_tokens": 512, "output_tokens": 128},
        search={"worlds": [4, 8], "most_sequences": 64, "resident": [0.5, 1.0], "methods": ["none", "q8"]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan(file: Path) -> ClusterPlan:
    return make_cluster_plan(file)


def test_the_text_is_that_of_the_last_look(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_cluster_plan(file, [], tmp_path / "rows.json", None)
    text = capsys.readouterr().out
    if os.environ.get("UMBRA_PRINTED") == "write":
        EXPECTED.write_text(text)
    assert text == EXPECTED.read_text()
    plan = make_cluster_plan(file)
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows == [row_of(found) for found in plan.found]
    for row, found in zip(rows, plan.found, strict=True):
        sizes, most = found.layout.sizes, found.most
        assert (row["replicas"], row["world"], row["method"]) == (sizes.replicas, sizes.world, sizes.method)
        assert row["attn_tp"] * row["attn_dp"] == row["moe_tp"] * row["moe_ep"] == sizes.world
        assert (row["attn_tp"], row["moe_tp"], row["resident"]) == (sizes.attn_tp, sizes.moe_tp, sizes.resident)
        assert (row["sequences"], row["most_sequences"]) == (found.load.sequences, found.layout.most_sequences)
        assert (row["tpot_ms"], row["ttft_ms"]) == (found.load.tpot * 1e3, found.load.ttft * 1e3)
        assert row["most_rate"] == (most.rate if most else 0)
        assert row["tokens_per_device"] == (most.tokens_per_device if most else 0)
        parts = found.layout.decode(found.load.sequences).parts
        assert row["parts_ms"] == {part: seconds * 1e3 for part, seconds in parts.items()}


def test_the_best_meet_both_targets(plan: ClusterPlan) -> None:
    assert plan.slow
    assert plan.refused
    assert plan.in_time == [
        f for f in plan.found if f.load.tpot <= TARGETS["tpot_ms"] / 1e3 and f.load.ttft <= TARGETS["ttft_ms"] / 1e3
    ]
    assert module.BEST < len(plan.in_time) < len(plan.found)
    assert plan.quickest == sorted(plan.in_time, key=lambda f: f.load.tpot)[: module.BEST]
    assert plan.cheapest == sorted(plan.in_time, key=lambda f: -f.most.rate if f.most else 0)[: module.BEST]
    first = plan.in_time[0]
    point, targets = first.load, plan.cluster.targets
    edge = type(point)(point.sequences, point.rate, targets.tpot_ms / 1e3, targets.ttft_ms / 1e3, 1.0)
    kept = ClusterPlan(plan.cluster, plan.hardware, [Found(first.layout, edge, None)], [], [])
    assert kept.in_time == kept.cheapest == kept.found  # just in time


def test_no_layout_in_time_and_none_at_all(file: Path, plan: ClusterPlan, tmp_path: Path) -> None:
    late = ClusterPlan(plan.cluster, plan.hardware, [f for f in plan.found if f not in plan.in_time], [], [])
    text = "\n".join(lines_of(late))
    assert "best for latency: no layout meets both targets at this load" in text
    assert "best for cost: no layout meets both targets at this load" in text
    quickest = min(late.found, key=lambda f: f.load.tpot)
    assert f"others, beside {quickest.layout.sizes}:" in text
    slow = ClusterPlan(plan.cluster, plan.hardware, [], plan.slow, [])
    assert "others, beside" not in "\n".join(lines_of(slow))
    small = write(tmp_path, search={"worlds": [8], "methods": ["q8"]})
    with pytest.raises(UserError, match=r"cluster\.yaml: no layout is possible; the first: .*platform: ascend"):
        show_cluster_plan(small, [], None, None)


def test_the_drawing_has_a_line_for_each_layout(
    plan: ClusterPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    real = pyplot.subplots
    monkeypatch.setattr(pyplot, "subplots", lambda **more: drawn.append(real(**more)) or drawn[0])
    module.draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    _, axes = drawn[0]
    *curves, edge, target = axes.lines
    layouts = [found.layout for found in plan.found] + plan.slow
    shown = [found.layout for found in (*plan.quickest, *plan.cheapest)]
    assert len(curves) == len(layouts)
    for line, layout in zip(curves, layouts, strict=True):
        found = points(layout)
        assert list(line.get_xdata()) == [p.tpot * 1e3 for p in found]
        assert list(line.get_ydata()) == [p.tokens_per_device for p in found]
        best = any(layout is one for one in shown)
        assert (line.get_linewidth(), line.get_zorder()) == ((1.8, 3) if best else (0.5, 2))
        assert (line.get_label() == str(layout.sizes)) == best
    everywhere = module.frontier([p for layout in layouts for p in points(layout)])
    assert list(edge.get_xdata()) == [p.tpot * 1e3 for p in everywhere]
    assert list(edge.get_ydata()) == [p.tokens_per_device for p in everywhere]
    assert list(target.get_xdata()) == [40, 40]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == (
        "ms a token", "output tokens/s a device", "log",
    )  # fmt: skip
