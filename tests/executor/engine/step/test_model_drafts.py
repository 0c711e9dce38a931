"""Guesses of a trained layer or head change no token: alone and in company, in chunks, behind cached prefixes, after
preemption, in captured graphs and on two ranks; some come true and some do not."""

from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.drafts import FreeDrafts
from tests.tiny import make_runner, tiny_case
from tests.variants import thorough_after, thorough_but
from umbra.base.files import ROOT
from umbra.executor.engine.schedule.request import Grammar, Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.loop import Loop
from umbra.models.tokenizers import tokenizer_in

CHECKPOINTS = ROOT / "checkpoints"
TEXTS = ["It is a truth universally acknowledged, that a single man in possession of a good fortune", "Emma was"]
TEXTS += ["Elizabeth, having rather expected to affront him, was amazed at his gallantry; but there was", "Mr. Darcy"]
TEXTS += ["“I have not the smallest objection,” said"]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.95, "seed": 3, "repetition_penalty": 1.05},
    {"temperature": 0.8, "seed": 1, "grammar": Grammar("regex", "[a-z ,;]+(Mr|Mrs)[.][A-Za-z ,;.]{0,60}[.]")},
]


class Demo(NamedTuple):
    name: str
    family: str
    drafts: dict[str, Any]
    more: dict[str, Any]


MTP = Demo("austen_hybrid", "qwen3_5_moe", {"method": "mtp"}, {})
HEAD = {"method": "eagle3", "model_path": "checkpoints/austen_moe_eagle3"}
EAGLE3 = Demo("austen_moe", "qwen3_moe", HEAD, {"offload_config": {"mode": "resident"}})  # pages in an arena


def answers(
    folder: Path, demo: Demo, exe_mode: str, drafts: FreeDrafts | None, pages: int = 0
) -> tuple[list[list[int]], Loop, int]:
    """Without `drafts` there are none."""
    case = tiny_case(
        folder,
        CHECKPOINTS / demo.name,
        model_name=demo.family,
        exe_mode=exe_mode,
        draft_config=demo.drafts if drafts else {},
        **demo.more,
        data_config={"batch_size": 3, "input_max_len": 120, "max_new_tokens": 40, "chunked_prefill_size": 16},
        serve_config={"reserve": 0},
        cache_config={"page_size": 4, "state_checkpoints": 30},
    )
    loop = Loop(make_runner(case, folder).engine, frozenset({0}), serving=True)
    if drafts:
        loop.scheduler.drafts = drafts
    free = loop.engine.pages.available(0)
    if pages:
        for pool in loop.scheduler.pools:
            pool.pages = pages
    tokenizer = tokenizer_in(CHECKPOINTS / demo.name, loop.engine.config.vocab_size)
    prompts, tokens = [tuple(tokenizer.encode(text, chat=False)) for text in TEXTS], []
    preempted = 0
    for turn in range(2):
        running = [
            loop.submit(Request(ids, SamplingParams(max_tokens=24 + 3 * i, **SAMPLINGS[i % 3])))
            for i, ids in enumerate(prompts)
        ]
        while not loop.idle:
            loop.step()
        tokens += [s.generated for s in running]
        prompts = [(*s.ids, *ids[:5]) for s, ids in zip(running, prompts, strict=True)]
        preempted += sum(s.preemptions for s in running)
        assert turn == 0 or all(s.cached_tokens for s in running) or pages
    cache = loop.scheduler.caches[0]
    cache.trim(0)
    assert (cache.held, cache.kept, loop.engine.pages.available(0)) == (0, 0, free)
    return tokens, loop, preempted


@pytest.mark.parametrize(
    ("demo", "exe_mode", "pages"), thorough_after(2, [(EAGLE3, "graph", 0), (MTP, "graph", 0), (MTP, "eager", 120)])
)
def test_tokens_are_those_without_drafts(tmp_path: Path, demo: Demo, exe_mode: str, pages: int) -> None:
    plain, *_ = answers(tmp_path, demo, exe_mode, None)
    tokens, loop, preempted = answers(tmp_path, demo, exe_mode, FreeDrafts(3), pages)
    assert tokens == plain
    timings = loop.timings
    assert 0.1 < timings.accepted_tokens / timings.drafted_tokens < 0.95
    assert timings.accepted_tokens > 0.15 * sum(map(len, tokens))
    assert bool(preempted) == bool(pages)


@pytest.mark.parametrize("demo", thorough_but([MTP, EAGLE3], MTP))
def test_steps_without_guesses_lose_those_of_running_sequences_only(tmp_path: Path, demo: Demo) -> None:
    """Sequences that start later get the same guesses as ever."""

    class Watched(FreeDrafts):
        def __init__(self, rests: bool):
            super().__init__(2)
            self.rests, self.seen = rests, dict[tuple[int, ...], list[int]]()

        def depth(self, sequences: ListOf[Sequence], count: int) -> int:
            rest = self.rests and any(len(s.generated) == 5 for s in sequences)
            return super().depth([] if rest else sequences, count)

        def propose(self, sequences: ListOf[Sequence], room: object) -> None:
            self.seen |= {tuple(s.ids): list(s.guesses) for s in sequences if s.guesses and not s.cached_tokens}

    guesses = []
    for rests in (False, True):
        _, loop, _ = answers(tmp_path, demo, "graph", Watched(rests))
        guesses.append(loop.scheduler.drafts.seen)  # type: ignore[union-attr]
    always, seldom = guesses
    assert 9 < len(seldom) < len(always) / 2
    assert all(always[ids] == guesses for ids, guesses in seldom.items())
