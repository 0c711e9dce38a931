"""Routing traces with published statistics of real models, which are not there.

An expert's weight is exp(skew * e + topic * r + near * u): e is drawn once, r for each request, u drifts with a
half-life of `NEAR` tokens. Each of a token's k experts is one of the token before with probability `repeat`; the others
are drawn by weight, without replacement. The four parameters of a model were fitted by random search to what is
published of it: rows of (policy, percent of all experts resident, value).
The sources are recipe (V4-Flash at 12.5 %), sglang #35314, club-3090 #861, colibri #119, imp #1358 and #2061, and
BigMoeOnEdge #33 and #101; Qwen3-Next's are inverted from speeds of KTransformers, its dynamic policy taken for LRU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from umbra.tools.benchmarks.cache_policies import Policy, by_prompt, lru
from umbra.tools.benchmarks.routing_traces import Prompt, Trace, pairs

LAYERS = 8  # fewer than the models have: all are alike
PROMPT, ANSWER, REQUESTS = 512, 200, 12  # tokens
NEAR = 32


@dataclass(frozen=True)
class TracedModel:
    name: str
    experts: int
    k: int
    skew: float
    topic: float
    near: float
    repeat: float
    published: tuple[tuple[str, float, float], ...]


MODELS = (
    TracedModel(
        "V4-Flash", 256, 6, 0.08, 0.79, 1.3, 0.07, (("prompt", 12.5, 0.285), ("lru", 15, 0.50), ("lru", 45, 0.81))
    ),
    TracedModel(
        "GLM-5.2",
        256,
        8,
        1.0,
        1.35,
        0.51,
        0.05,
        (("lru", 5, 0.24), ("lru", 7.4, 0.40), ("lru", 9.8, 0.46), ("lru", 12.3, 0.51), ("lru", 18.4, 0.60)),
    ),
    TracedModel(
        "Qwen3-30B-A3B",
        128,
        8,
        0.9,
        1.7,
        1.5,
        0.05,
        (("lru", 40, 0.925), ("static", 40, 0.705), ("request", 40, 0.92), ("repeat", 0, 0.45)),
    ),
    TracedModel(
        "Qwen3.8-Flash-Next",
        512,
        10,
        0.15,
        0.11,
        0.7,
        0.24,
        (("lru", 18, 0.435), ("lru", 36, 0.62), ("lru", 54, 0.72), ("lru", 73, 0.79), ("static", 6, 0.10)),
    ),
    TracedModel(
        "Qwen3-Next",
        512,
        10,
        0.2,
        0.11,
        0.3,
        0.39,
        (
            ("static", 10, 0.18),
            ("static", 40, 0.51),
            ("static", 60, 0.67),
            ("static", 80, 0.90),
            ("lru", 10, 0.46),
            ("lru", 20, 0.55),
            ("lru", 40, 0.65),
        ),
    ),
    TracedModel("gpt-oss-120b", 128, 4, 0.94, 0.97, 0.56, 0.01, (("lru", 3.2, 0.085), ("repeat", 0, 0.18))),
)


def trace_of(model: TracedModel, seed: int = 0, requests: int = REQUESTS) -> Trace:
    """Requests one after another, each a prompt and an answer."""
    random, shape, k = np.random.default_rng(seed), (LAYERS, model.experts), model.k
    keep, rows = 0.5 ** (1 / NEAR), np.arange(LAYERS)[:, None]
    lasting = model.skew * random.normal(size=shape)
    answers, prompts = [], []  # answers: ids and ranks
    for request in range(requests):
        of_request, near = lasting + model.topic * random.normal(size=shape), random.normal(size=shape)
        routed, last = np.empty((2, PROMPT + ANSWER, LAYERS, k), np.int16), np.zeros((LAYERS, 0), np.int64)
        for step in range(PROMPT + ANSWER):
            near = keep * near + (1 - keep**2) ** 0.5 * random.normal(size=shape)
            weights = of_request + model.near * near
            keys, chances = weights + random.gumbel(size=shape), np.exp(weights)
            chances *= (1 - model.repeat) * k / chances.sum(axis=1, keepdims=True)
            keys[rows, last] += np.where(random.random(last.shape) < model.repeat, np.inf, 0)
            chances[rows, last] += model.repeat
            last = np.argpartition(-keys, k - 1, axis=1)[:, :k]
            ranks = np.argsort(np.argsort(-chances, axis=1), axis=1)
            routed[:, step] = last, ranks[rows, last]
        prompts.append(Prompt(request * ANSWER, routed[0, :PROMPT]))
        answers.append(routed[:, PROMPT:])
    ids, known = np.concatenate(answers, axis=1)
    return Trace(model.name, ids, model.experts, prompts=tuple(prompts), ranks=known)


def statistics_of(model: TracedModel, trace: Trace) -> Iterator[tuple[str, float, float, float]]:
    """Yields the published figures of the model beside those of the trace: (policy, percent, published, here)."""
    for policy, percent, value in model.published:
        yield policy, percent, value, STATISTICS[policy](trace, int(trace.size * percent / 100))


def hit_rate(policy: Policy, trace: Trace, slots: int) -> float:
    return policy(trace, slots).measured()[0]


def best_fixed(trace: Trace, slots: int, by_request: bool = False) -> float:
    """The hit rate of the experts most used in all answers, or in each of them."""
    ends = [*(prompt.before for prompt in trace.prompts), len(trace.ids)] if by_request else [0, len(trace.ids)]
    parts = [np.bincount(trace.places()[a:b].ravel(), minlength=trace.size) for a, b in pairwise(ends)]
    return float(sum(np.sort(counts)[-slots:].sum() for counts in parts) / trace.ids.size)


def repeats(trace: Trace, slots: int) -> float:
    """The share of a token's experts that the token before it used as well."""
    keys = pairs(trace.ids, trace.experts)
    used = np.zeros((len(keys), trace.size), np.bool_)
    np.put_along_axis(used, keys, True, axis=1)
    return float((used[1:] & used[:-1]).sum() / keys[1:].size)


STATISTICS: dict[str, Callable[[Trace, int], float]] = {
    "lru": partial(hit_rate, lru),
    "prompt": partial(hit_rate, by_prompt),
    "static": best_fixed,
    "request": partial(best_fixed, by_request=True),
    "repeat": repeats,
}
