"""Routing traces: which experts each decode step used in each layer; recorded from the demo model, or synthetic.

A trace file is an .npz with `ids`, uint8 (steps, layers, k), and `experts`, the number of each layer's.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from executor.config.env import RankEnv
from executor.config.load import load_case
from executor.launch.rank import run_rank
from executor.model_runner import make_runner
from models.layers.experts import Experts
from umbra.commands.evaluate import read_windows
from umbra.commands.logits import prefill_logits, with_room
from umbra.files import write_whole

WINDOW = 1024  # tokens of text in one context of the demo model
KINDS = ("uniform", "Zipf", "Zipf, drifting", "Zipf, new halfway")


@dataclass(frozen=True)
class Trace:
    name: str
    ids: npt.NDArray[np.uint8]  # (steps, layers, k)
    experts: int

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @property
    def size(self) -> int:
        """Number of experts in all layers."""
        return self.layers * self.experts

    def places(self) -> npt.NDArray[np.int64]:
        """layer * experts + expert. (steps, layers * k)"""
        keys = self.ids + (np.arange(self.layers) * self.experts)[None, :, None]
        return keys.reshape(len(self.ids), -1)

    def uses(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(keys of all steps in order, the index at which each step begins). A key appears once in a step, since its
        weights are read once."""
        keys = np.sort(self.places(), axis=1)
        first = np.ones_like(keys, bool)
        first[:, 1:] = keys[:, 1:] != keys[:, :-1]
        return keys[first], np.cumsum(np.r_[0, first.sum(axis=1)])[:-1]

    def together(self, sequences: int) -> "Trace":
        """The trace of decoding `sequences` parts of the text in one batch."""
        steps = len(self.ids) // sequences
        parts = self.ids[: steps * sequences].reshape(sequences, steps, self.layers, -1)
        joined = parts.transpose(1, 2, 0, 3).reshape(steps, self.layers, -1)
        return dataclasses.replace(self, name=f"{self.name}, {sequences} at once", ids=joined)


def save_trace(path: Path, trace: Trace) -> None:
    write_whole(path, lambda file: np.savez_compressed(file, ids=trace.ids, experts=trace.experts))


def load_trace(path: Path) -> Trace:
    with np.load(path) as data:
        return Trace("demo", data["ids"], int(data["experts"]))


def record_demo(results: Path, steps: int | None) -> Trace:
    """The trace of the demo model on its held-out text, one step for each token.

    The text is given, so all tokens of a window run in one prefill, with the routing that decode steps would have.
    """
    case = with_room(load_case("demo", ["exe_mode=eager"]), 1, WINDOW, new_tokens=1)
    traces: list[Trace] = []

    def record(results: Path, ranks: RankEnv) -> None:
        runner = make_runner(case, results, ranks)
        runner.setup()
        kept: list[npt.NDArray[np.uint8]] = []
        experts = [m for m in runner.engine.model.modules() if isinstance(m, Experts)]
        for layer in experts:
            layer.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[1][1].numpy().astype(np.uint8)))
        windows = read_windows(case, runner.folder / "held_out.txt", WINDOW)
        for window in windows[: -(-steps // WINDOW) if steps else None]:
            prefill_logits(runner, [window])
        layers = [np.concatenate(kept[i :: len(experts)]) for i in range(len(experts))]  # each (tokens, k)
        traces.append(Trace("demo", np.stack(layers, axis=1)[:steps], runner.config.expert_count))

    run_rank(case, results, record)
    return traces[0]


def made_up(kind: str, steps: int, layers: int = 32, experts: int = 128, k: int = 8, seed: int = 0) -> Trace:
    """Every step draws k different experts of each layer; Zipf: the r-th most popular with weight 1 / r."""
    random = np.random.default_rng(seed)
    order = np.argsort(random.random((layers, experts)), axis=1)  # expert of each rank of popularity
    weights = np.zeros(experts) if kind == "uniform" else -np.log(np.arange(1, experts + 1))
    ids = np.empty((steps, layers, k), np.uint8)
    for step in range(steps):
        if kind == "Zipf, drifting":  # two experts of each of two layers change places
            for layer in random.integers(0, layers, 2):
                a, b = random.integers(0, experts, 2)
                order[layer, [a, b]] = order[layer, [b, a]]
        if kind == "Zipf, new halfway" and step == steps // 2:
            order = np.argsort(random.random((layers, experts)), axis=1)
        keys = weights + random.gumbel(size=(layers, experts))  # the k largest are a draw without replacement
        ids[step] = np.take_along_axis(order, np.argpartition(-keys, k - 1, axis=1)[:, :k], axis=1)
    return Trace(kind, ids, experts)
