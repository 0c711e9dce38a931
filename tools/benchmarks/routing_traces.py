"""Routing traces: which experts each decode step used in each layer; recorded from the demo model, or synthetic.

A trace file is an .npz with `ids`, uint8 (steps, layers, k), `tokens`, int16 (steps), whose routing that is, and
`experts`, the number of each layer's.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from umbra.base.files import write_whole
from umbra.commands.evaluate import read_windows
from umbra.commands.logits import prefill_logits, with_room
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import make_runner
from umbra.models.layers.experts import Experts

WINDOW = 1024  # tokens of text in one context of the demo model
KINDS = ("uniform", "Zipf", "Zipf, drifting", "Zipf, new halfway")


Ids = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Prompt:
    before: int  # the decode step that follows it
    ids: Ids  # (tokens, layers, k)


@dataclass(frozen=True)
class Trace:
    name: str
    ids: Ids  # (steps, layers, k)
    experts: int
    tokens: Ids | None = None  # (steps, sequences), if they are known
    prompts: tuple[Prompt, ...] = ()  # in their order
    sequences: int = 1  # at once
    ranks: Ids | None = None  # of `ids`: how many experts were more probable in that step, if that is known

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @property
    def size(self) -> int:
        """Number of experts in all layers."""
        return self.layers * self.experts

    def places(self) -> Ids:
        """layer * experts + expert. (steps, layers * k)"""
        return pairs(self.ids, self.experts)

    def tokens_of(self, step: int) -> list[int]:
        """The tokens whose routing is the step's, if they are known."""
        return [] if self.tokens is None or step == len(self.ids) else list(map(int, self.tokens[step]))

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
        parts = [slice(i * steps, (i + 1) * steps) for i in range(sequences)]
        tokens = None if self.tokens is None else np.hstack([self.tokens[part] for part in parts])
        name = f"{self.name}, {sequences} at once"
        return Trace(
            name, np.concatenate([self.ids[part] for part in parts], axis=2), self.experts, tokens, (), sequences
        )

    def requests(self, sequences: int) -> "Trace":
        """The trace of requests, `sequences` at once, whose prompts are the first halves of windows. They begin at
        different times."""
        half, windows = WINDOW // 2, len(self.ids) // WINDOW // sequences
        streams, prompts = [], []
        for number in range(sequences):
            late = half * number // sequences  # tokens by which the first prompt is longer
            firsts = [(number * windows + window) * WINDOW for window in range(windows)]
            streams.append(np.concatenate([np.arange(first + half, first + WINDOW) for first in firsts])[late:])
            for window, first in enumerate(firsts):
                end = first + half + (0 if window else late)
                prompts.append(Prompt(max(0, window * half - late), self.ids[first:end]))
        rows = np.stack([of[: len(streams[-1])] for of in streams])  # the last stream is the shortest
        tokens = None if self.tokens is None else np.hstack([self.tokens[of] for of in rows])
        ids = np.concatenate([self.ids[of] for of in rows], axis=2)
        name = f"{self.name}, requests, {sequences} at once"
        kept = sorted((p for p in prompts if p.before < len(ids)), key=lambda prompt: prompt.before)
        return Trace(name, ids, self.experts, tokens, tuple(kept), sequences)


def pairs(ids: Ids, experts: int) -> Ids:
    """layer * experts + expert. (steps, layers * k)"""
    return (ids.astype(np.int64) + (np.arange(ids.shape[1]) * experts)[None, :, None]).reshape(len(ids), -1)


def save_trace(path: Path, trace: Trace) -> None:
    tokens = np.asarray(trace.tokens)
    write_whole(path, lambda file: np.savez_compressed(file, ids=trace.ids, tokens=tokens, experts=trace.experts))


def load_trace(path: Path) -> Trace:
    with np.load(path) as data:
        return Trace("demo", data["ids"], int(data["experts"]), data["tokens"])


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
        tokens = np.concatenate(windows[: len(kept) // len(experts)]).astype(np.int16)[:steps, None]
        traces.append(Trace("demo", np.stack(layers, axis=1)[:steps], runner.config.expert_count, tokens))

    run_rank(case, results, record)
    return traces[0]


def made_up(kind: str, steps: int, layers: int = 32, experts: int = 128, k: int = 8, seed: int = 0) -> Trace:
    """Every step draws k different experts of each layer; Zipf: the r-th most popular with weight 1 / r."""
    random = np.random.default_rng(seed)
    order = np.argsort(random.random((layers, experts)), axis=1)  # expert of each rank of popularity
    weights = np.zeros(experts) if kind == "uniform" else -np.log(np.arange(1, experts + 1))
    ids, ranks = np.empty((2, steps, layers, k), np.uint8)
    for step in range(steps):
        if kind == "Zipf, drifting":  # two experts of each of two layers change places
            for layer in random.integers(0, layers, 2):
                a, b = random.integers(0, experts, 2)
                order[layer, [a, b]] = order[layer, [b, a]]
        if kind == "Zipf, new halfway" and step == steps // 2:
            order = np.argsort(random.random((layers, experts)), axis=1)
        keys = weights + random.gumbel(size=(layers, experts))  # the k largest are a draw without replacement
        ranks[step] = np.argpartition(-keys, k - 1, axis=1)[:, :k]
        ids[step] = np.take_along_axis(order, ranks[step], axis=1)
    return Trace(kind, ids, experts, ranks=ranks)
