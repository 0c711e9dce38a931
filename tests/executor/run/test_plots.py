"""What the plots of a run with shadow experts show."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

from cpu_offload.history import History
from executor.run.plots import MOST_LABELS, plot
from tests.cpu_offload.test_history import HIDDEN, WAITED, history, step


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, of: History) -> Any:
    """The axes of experts, memory and hit rate."""
    made: list[Any] = []
    real = pyplot.subplots
    monkeypatch.setattr(pyplot, "subplots", lambda *given, **more: made.append(real(*given, **more)) or made[-1])
    before = pyplot.get_fignums()
    plot(of, path)
    assert pyplot.get_fignums() == before  # it is closed
    assert path.read_bytes().startswith(b"\x89PNG")
    return made[0][1]


def test_residents_memory_and_hits_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = history()
    of.steps.append(step(21000, [0, 0], [0, 0], [[0, 0, 0, 0]] * 2, 2, 9))  # without pairs
    of.routed = np.array([[3, 9, 6], [0, 0, 12]])
    experts, memory, rate = drawn(monkeypatch, tmp_path / "plot.png", of)
    [image] = experts.images
    heat = image.get_array()
    assert heat.shape == (6, 3)
    assert np.ma.getmaskarray(heat)[:, 0].tolist() == [True, False, False, False, True, True]
    assert heat[[1, 2, 3], 0].tolist() == [2.0, 1.0, 4.0]  # the most used ones on top of each layer
    assert image.get_extent() == [-0.5, 2.5, 2, 0]
    assert image.norm.vmin == 0
    assert [line.get_ydata()[0] for line in experts.lines] == [1]
    assert experts.get_yticks().tolist() == [0.5, 1.5]
    assert [label.get_text() for label in experts.get_yticklabels()] == ["0", "1"]
    shares = 100 * np.array([[4, 9, 2], [8, 6, 9], [1, 1, 1]]) / 20
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in memory.collections]
    np.testing.assert_allclose(tops, shares.cumsum(0).max(1))
    assert memory.get_ylim() == (0, 100)
    assert [text.get_text() for text in memory.get_legend().get_texts()] == ["free", "resident experts", "KV cache"]
    each, mean = rate.lines
    assert each.get_ydata().tolist() == pytest.approx([80.0, 100 * 4 / 6, 100.0])
    assert mean.get_ydata()[0] == pytest.approx(100 * 8 / 11)
    assert mean.get_label() == "of the run: 72.7 %"
    assert rate.get_ylim() == (0, 102)
    assert rate.get_xlabel() == "decode step"


def test_few_layers_are_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def many(layers: int) -> History:
        times = [[0, 0, 0, 0]] * layers
        one = step(0, [1] * layers, [0] * layers, times, 1, 1)
        wide = type(one)(0, 1, one.hits, one.misses, one.times, np.zeros((layers, 1), np.uint8), 2, 1, 1, 1)
        return History(steps=[wide], routed=np.zeros((layers, 2), np.int64))

    experts, *_ = drawn(monkeypatch, tmp_path / "plot.png", many(MOST_LABELS))
    assert len(experts.get_yticks()) == MOST_LABELS
    experts, *_ = drawn(monkeypatch, tmp_path / "plot.png", many(MOST_LABELS + 1))
    assert experts.get_yticks().tolist() == [layer + 0.5 for layer in range(0, MOST_LABELS + 1, 2)]
    assert (WAITED.experts, HIDDEN.experts) == (3, 3)
