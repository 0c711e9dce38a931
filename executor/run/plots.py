"""Draws offload.png: three plots of a run with shadow experts, over its decode steps."""

from pathlib import Path
from typing import Any

import numpy as np

from umbra.base.files import write_whole
from umbra.cpu_offload.history import History

MOST_LABELS = 16  # most layers that are labelled at an axis
TENANTS = {"KV cache": "#4c78a8", "resident experts": "#f0a35e", "free": "#d9d9d9"}


def plot(history: History, path: Path) -> None:
    """Draws which experts were resident and how often each was used, how the arena was shared, and the hit rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (experts, memory, rate) = plt.subplots(
        3, 1, figsize=(10.5, 11), sharex=True, height_ratios=(3.2, 1.3, 1.3), layout="constrained"
    )
    figure.suptitle("Experts and KV cache share one arena of device memory while text is generated", fontweight="bold")
    _residents(figure, experts, history)
    _memory(memory, history)
    _hit_rate(rate, history)
    rate.set_xlabel("decode step")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)


def _residents(figure: Any, axes: Any, history: History) -> None:
    """Draws a row for each expert, sorted by use within a layer. A row is coloured, by the expert's use, at the steps
    at which the expert is resident."""
    resident = np.stack([step.resident for step in history.steps], axis=2)  # (L, E, steps)
    layers, experts, steps = resident.shape
    order = np.argsort(-history.routed, axis=1, kind="stable")  # (L, E)
    use = np.take_along_axis(history.routed, order, axis=1) / steps
    shown = np.take_along_axis(resident, order[:, :, None], axis=1)
    heat = np.ma.masked_where(~shown, np.broadcast_to(use[:, :, None], shown.shape)).reshape(layers * experts, steps)
    image = axes.imshow(
        heat, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, extent=(-0.5, steps - 0.5, layers, 0)
    )
    axes.set_facecolor("white")
    for layer in range(1, layers):
        axes.axhline(layer, color="black", linewidth=0.8)
    labelled = range(0, layers, -(-layers // MOST_LABELS))
    axes.set_yticks([layer + 0.5 for layer in labelled], [str(layer) for layer in labelled])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(f"layer; in each its {experts} experts, the most used on top")
    axes.set_title(
        "Coloured: the expert is resident on the device.  White: only its shadow on the CPU exists.", fontsize=11
    )
    bar = axes.inset_axes((1.02, 0, 0.025, 1))
    figure.colorbar(image, cax=bar, label="use of the expert: tokens per decode step, mean of the run")


def _memory(axes: Any, history: History) -> None:
    frames = np.array([(step.kv_frames, step.expert_frames, step.free_frames) for step in history.steps]).T
    shares = 100 * frames / max(history.frames, 1)
    bands = axes.stackplot(range(len(history.steps)), shares, labels=list(TENANTS), colors=list(TENANTS.values()))
    axes.set(ylabel="share of the arena, %", ylim=(0, 100))
    axes.set_title(
        f"How the arena is divided: {history.frames} frames, each as large as one page of the KV cache", fontsize=11
    )
    axes.legend(handles=bands[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _hit_rate(axes: Any, history: History) -> None:
    hits = np.array([step.hits.sum() for step in history.steps])
    pairs = hits + [step.misses.sum() for step in history.steps]
    rates = 100 * np.divide(hits, pairs, out=np.ones(len(hits)), where=pairs > 0)
    mean = 100 * hits.sum() / max(pairs.sum(), 1)
    axes.plot(rates, color="#2a7f62", linewidth=1.2, label="of each step")
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"of the run: {mean:.1f} %")
    axes.set(ylabel="hit rate, %", ylim=(0, 102))
    axes.set_title(
        "Hit rate: share of (token, expert) pairs that the device computes; the CPU computes the others", fontsize=11
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
