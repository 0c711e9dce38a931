"""Three plots of a run with shadow experts, in one PNG."""

from pathlib import Path

import numpy as np

from cpu_offload.history import History
from files import write_whole


def plot(history: History, path: Path) -> None:
    """Where experts were, how the arena was shared, how often an expert was found resident; over decode steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = history.steps
    resident = np.stack([step.resident.ravel() for step in steps], axis=1)  # (L E, steps)
    layers, experts = steps[0].resident.shape
    figure, (where, memory, rate) = plt.subplots(3, 1, figsize=(9, 10), sharex=True, height_ratios=(3, 1.5, 1.5))
    where.imshow(resident, aspect="auto", interpolation="nearest", cmap="Greys", origin="lower")
    where.set_yticks([experts * (layer + 0.5) for layer in range(layers)], [str(layer) for layer in range(layers)])
    where.set_ylabel(f"layers of {experts} experts; black: resident")
    tenants = np.array([(s.kv_frames, s.expert_frames, s.free_frames) for s in steps]).T
    colours = ("tab:blue", "tab:orange", "lightgrey")
    memory.stackplot(range(len(steps)), tenants, labels=("KV cache", "experts", "free"), colors=colours)
    memory.set_ylabel("frames of the arena")
    memory.legend(loc="upper right")
    hits = np.array([step.hits.sum() for step in steps])
    pairs = hits + [step.misses.sum() for step in steps]
    rate.plot(np.divide(hits, pairs, out=np.ones(len(steps)), where=pairs > 0))
    rate.set(ylabel="hit rate", xlabel="decode step", ylim=(0, 1.02))
    figure.tight_layout()
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)
