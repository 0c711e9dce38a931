"""Conversations of an agent with a model that has recurrent states: what a turn computes again, and what it shares."""

import itertools
from math import nan
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.drafts import lookup
from tests.tiny import make_runner, save_tiny_of, tiny_case
from tests.variants import thorough_but
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.loop import Loop
from umbra.executor.plan.kv_caches import recurrent

PAGE = 16
ASKS = [7, 8, 9]  # the generation prompt, of which the history has all but the last token
SYSTEM = [(11 * i) % 300 + 10 for i in range(75)]
TURNS = ["user", "tool", "tool", "user", "user", "tool", "user", "tool", "tool", "tool"]


class Conversation:
    """Text of a template that drops what was thought before the last turn of a user: the first tokens of answers."""

    def __init__(self, number: int):
        self.number, self.parts, self.known = number, [SYSTEM], list[list[int]]()

    def prompt(self, turn: int) -> list[int]:
        if TURNS[turn] == "user":
            self.parts = [ASKS[:2] + part[7:] if part[:3] == ASKS else part for part in self.parts]
        length = 3 + (5 * turn + 7 * self.number) % 30
        self.parts.append([(13 * i + 29 * turn + 101 * self.number) % 300 + 10 for i in range(length)])
        return [*(token for part in self.parts for token in part), *ASKS]

    def common(self, prompt: list[int]) -> int:
        """The most tokens that it has in common with what was computed before."""
        same = (itertools.takewhile(lambda two: two[0] == two[1], zip(prompt, ids, strict=False)) for ids in self.known)
        return max((len(list(pairs)) for pairs in same), default=0)

    def answered(self, sequence: Sequence) -> None:
        self.parts.append([*ASKS, *sequence.generated])
        self.known.append(sequence.ids[:-1].tolist())


@pytest.fixture(scope="module", params=thorough_but(["qwen3_next", "qwen3_5", "qwen4_exp"], "qwen3_next"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, named as its family."""
    folder = tmp_path_factory.mktemp("conversations") / request.param
    end = 319 if request.param == "qwen4_exp" else None
    save_tiny_of(folder, request.param, eos_token_id=end, num_hidden_layers=4, max_position_embeddings=1024)
    return folder


def loop_of(model: Path, checkpoints: int, drafts: int = 0) -> Loop:
    data = {"batch_size": 4, "input_max_len": 600, "max_new_tokens": 40}
    case = tiny_case(
        model.parent,
        model,
        model_name=model.name,
        exe_mode="graph",
        data_config=data,
        draft_config=lookup(drafts),
        cache_config={"page_size": PAGE, "state_checkpoints": checkpoints},
    )
    engine = make_runner(case, model.parent).engine
    first: Any = recurrent(engine.model)[0]
    any_place = first.delta
    any_place.as_strided((any_place.untyped_storage().nbytes() // 4,), (1,), 0).fill_(nan)  # what others left
    return Loop(engine, frozenset(), serving=True)


def answer(loop: Loop, *prompts: list[int]) -> list[Sequence]:
    params = SamplingParams(max_tokens=PAGE + sum(map(len, prompts)) % 24)
    sent = [loop.submit(Request(tuple(ids), params, branches=(len(SYSTEM), len(ids) - len(ASKS)))) for ids in prompts]
    while not loop.idle:
        loop.step()
    return sent


@pytest.mark.parametrize("checkpoints", [40, 1])
def test_a_turn_computes_what_is_new(model: Path, checkpoints: int) -> None:
    """And less than a page and a generation prompt more, if answers have a page at least. Where memory is short, a turn
    may compute more, but says the same."""
    loop, plain = loop_of(model, checkpoints), loop_of(model, 0)
    talks = [Conversation(1), Conversation(2)]
    for turn in range(len(TURNS)):
        prompts = [talk.prompt(turn) for talk in talks]
        sent = answer(loop, *prompts)
        alone = Loop(plain.engine, frozenset())
        assert [s.generated for s in answer(alone, *prompts)] == [s.generated for s in sent]
        for talk, s in zip(talks, sent, strict=True):
            lost = talk.common(s.ids[: s.prompt_len].tolist()) - s.cached_tokens
            assert lost >= 0
            assert lost < PAGE + len(ASKS) or checkpoints == 1
            talk.answered(s)
    check_empty(loop)


@pytest.mark.parametrize("drafts", [0, 3])
def test_branches_share_pages_and_states(model: Path, drafts: int) -> None:
    """Two prompts go on from one checkpoint at once, whose owner still runs, beside one of a single token."""
    loop, plain = loop_of(model, 4, drafts), Loop(loop_of(model, 0).engine, frozenset())
    first = loop.submit(Request(tuple(SYSTEM), SamplingParams(max_tokens=40), branches=(len(SYSTEM) - 3,)))
    while not first.generated:
        loop.step()
    cache, pages = loop.scheduler.caches[0], len(SYSTEM) // PAGE
    sets = cache.sets
    branches = [*([*SYSTEM[: pages * PAGE], *([number] * 9)] for number in (5, 6)), [12]]
    sent = [loop.submit(Request(tuple(ids), SamplingParams(max_tokens=9))) for ids in branches]
    loop.step()
    assert [s.cached_tokens for s in sent] == [pages * PAGE, pages * PAGE, 0]
    assert len({id(s.held[0].blocks[0]) for s in (first, *sent[:2])}) == 1
    assert cache.sets == sets + len(sent)
    while not loop.idle:
        loop.step()
    assert [s.generated[:9] for s in answer(plain, *branches)] == [s.generated for s in sent]
    check_empty(loop)


def check_empty(loop: Loop) -> None:
    cache = loop.scheduler.caches[0]
    cache.trim(0)
    assert (cache.held, cache.kept, cache.sets, loop.engine.pages.available(0)) == (0, 0, 0, loop.engine.pages.pages)
