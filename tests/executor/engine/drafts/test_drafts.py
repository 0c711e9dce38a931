"""Drafts change no token, are right where text repeats itself, and are left out where they do not pay."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from llguidance import LLMatcher, LLTokenizer

from tests.fakes.drafts import FreeDrafts, lookup
from tests.families.deepseek_v3 import EXPANDED
from tests.families.gemma4 import SHARED
from tests.quantised import mxfp4_tiny
from tests.tiny import make_runner, save_tiny, save_tiny_of, tiny_case
from umbra.executor.engine.drafts.drafts import DecodeCost, Drafts, Guessed
from umbra.executor.engine.drafts.ngrams import MATCH, NgramIndex
from umbra.executor.engine.schedule.grammar import Matcher
from umbra.executor.engine.schedule.request import Event, Request, SamplingParams
from umbra.executor.engine.schedule.sequence import Sequence, new_sequence
from umbra.executor.engine.step.loop import Loop
from umbra.models.registry import family_in

PROMPTS = [[5, 17, 3] * 4, [7, 8, 9, 7, 8, 9, 7], list(range(30, 53)), [11, 12], [90, 3, 3, 8]]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.5, "top_p": 0.9, "seed": 3, "logprobs": 2, "stop_token_ids": (50,)},
    "penalised": {"temperature": 0.3, "seed": 1, "frequency_penalty": 0.02, "repetition_penalty": 1.01},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "model"
    save_tiny(folder, eos_token_id=None, moe_intermediate_size=32)
    return folder


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of eight tokens, biases, MXFP4."""
    folder = tmp_path_factory.mktemp("drafts") / "gpt_oss"
    save_tiny_of(folder.with_name("floats"), "gpt_oss", eos_token_id=None)
    mxfp4_tiny(folder.with_name("floats"), folder)
    return folder


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "deepseek_v3"
    widths = dict(moe_intermediate_size=32, intermediate_size=64) | EXPANDED
    save_tiny_of(folder, "deepseek_v3", eos_token_id=None, num_hidden_layers=4, **widths)
    return folder


def loop_of(model: Path, draft_tokens: int, exe_mode: str, **options: Any) -> Loop:
    data = {"batch_size": 3, "max_new_tokens": 64}
    case = tiny_case(
        model.parent, model, exe_mode=exe_mode, data_config=data, draft_config=lookup(draft_tokens), **options
    )
    loop = make_runner(case, model.parent).loop
    if draft_tokens:
        loop.scheduler.drafts = FreeDrafts(draft_tokens)
    return loop


def answers(loop: Loop, sampling: dict[str, Any]) -> dict[int, list[Event]]:
    params = SamplingParams(**({"max_tokens": 33} | sampling))
    events: dict[int, list[Event]] = {loop.submit(Request(tuple(prompt), params)).id: [] for prompt in PROMPTS}
    while not loop.idle:
        for event in loop.step():
            events[event.id].append(event)
    return events


@pytest.mark.parametrize(("kind", "exe_mode"), [("greedy", "graph"), ("sampled", "eager"), ("penalised", "graph")])
def test_tokens_are_those_without_drafts(model: Path, kind: str, exe_mode: str) -> None:
    plain, drafting = loop_of(model, 0, exe_mode), loop_of(model, 5, exe_mode)
    expected, drafted = answers(plain, SAMPLING[kind]), answers(drafting, SAMPLING[kind])
    for id, events in expected.items():
        for read in (lambda event: event.tokens, lambda event: event.logprobs):
            one: Callable[[Event], tuple[Any, ...]] = read
            assert [part for e in drafted[id] for part in one(e)] == [part for e in events for part in one(e)]
        assert drafted[id][-1].finish_reason == events[-1].finish_reason
    assert 0 < drafting.timings.accepted_tokens < drafting.timings.drafted_tokens
    assert drafting.timings.decode_tokens == plain.timings.decode_tokens
    if kind == "greedy":
        assert len(drafting.timings.per_token) < 0.9 * len(plain.timings.per_token)
    assert not drafting.scheduler.caches[0].held


@pytest.mark.parametrize(
    ("name", "quantization"), [("model", {"method": "q8"}), ("oss", {"rest": "q8"}), ("latent", {"method": "q8"})]
)
def test_tokens_are_the_same_in_quantised_models_with_shadow_experts(
    request: pytest.FixtureRequest, name: str, quantization: dict[str, str]
) -> None:
    model = request.getfixturevalue(name)
    options: dict[str, Any] = {"model_name": family_in(model), "quantization": quantization}
    options |= {"cache_config": {"page_size": 4, "kv_dtype": "int8"}}
    options |= {"offload_config": {"mode": "elastic", "arena_mb": 0.3, "max_swaps": 2}}
    tokens = [
        {id: [t for e in events for t in e.tokens] for id, events in answers(loop, SAMPLING["sampled"]).items()}
        for loop in (loop_of(model, most, "graph", **options) for most in (0, 7))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("sizes", [{}, SHARED], ids=["mixture", "shared"])
def test_tokens_are_the_same_with_heads_of_two_widths(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Windows of five tokens are passed by drafts that are wrong."""
    save_tiny_of(tmp_path / "model", "gemma4", eos_token_id=None, **sizes, sliding_window=5)
    options: dict[str, Any] = {"model_name": "gemma4", "cache_config": {"page_size": 4}}
    loops = [loop_of(tmp_path / "model", most, "graph", **options) for most in (0, 7)]
    sampling = SAMPLING["sampled"] | {"temperature": 1.0, "logit_bias": {3: 6.0, 5: 6.0}}
    plain, drafted = (answers(loop, sampling) for loop in loops)
    assert [[t for e in of for t in e.tokens] for of in plain.values()] == [
        [t for e in of for t in e.tokens] for of in drafted.values()
    ]
    assert 0 < loops[1].timings.accepted_tokens < loops[1].timings.drafted_tokens


@pytest.mark.parametrize(
    ("family", "exe_mode", "end"),
    [("qwen3_next", "eager", None), ("qwen3_next", "graph", None), ("qwen4_exp", "graph", 319)],
)
def test_tokens_are_the_same_where_states_go_back(tmp_path: Path, family: str, exe_mode: str, end: int | None) -> None:
    """A request that continues an answer starts from the states after one of its last pages."""
    save_tiny_of(tmp_path / "model", family, eos_token_id=end)
    outcomes = {}
    for most in (0, 5):
        cache_config = {"page_size": 4, "state_checkpoints": 30}
        loop = loop_of(tmp_path / "model", most, exe_mode, model_name=family, cache_config=cache_config)
        loop = Loop(loop.engine, frozenset(), serving=True)
        if most:
            loop.scheduler.drafts = FreeDrafts(most)
        events = answers(
            loop, {"logit_bias": {3: 50.0, 5: 50.0}, "max_tokens": 60, "temperature": 0.5}
        )  # which repeat soon
        first = {id: [token for event in of for token in event.tokens] for id, of in events.items()}
        whole = [[*prompt, *first[id]] for id, prompt in enumerate(PROMPTS)]
        again = [loop.submit(Request((*ids, 7, 8, 9, 10), SamplingParams(max_tokens=9))) for ids in whole]
        while not loop.idle:
            loop.step()
        missing = {(len(ids) - 1) // 4 * 4 - s.cached_tokens for ids, s in zip(whole, again, strict=True)}
        assert missing <= ({0, 4, 8} if most else {0})  # an answer may end with drafts that pass a page
        outcomes[most] = first, [s.generated for s in again]
        cache = loop.scheduler.caches[0]
        assert (cache.held, cache.live_states) == (0, 0)
        cache.trim(0)
        assert (cache.kept, cache.sets, loop.engine.pages.available(0)) == (0, 0, loop.engine.pages.pages)
    assert outcomes[0] == outcomes[5]
    assert 0 < loop.timings.accepted_tokens < loop.timings.drafted_tokens


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9))
def test_a_draft_is_what_followed_the_last_tokens_when_they_were_last_there(text: list[int], most: int) -> None:
    ngrams, ids = NgramIndex(), array("q")
    for token in text:
        ids.append(token)
        draft = list(ngrams.look_up(ids, most))
    places = [end for end in range(MATCH, len(text)) if text[end - MATCH : end] == text[-MATCH:]]
    if len(text) < MATCH or not places:
        assert not draft
    else:
        repeated = text + (text[places[-1] :] * (most + 1))[:most]
        assert draft == repeated[places[-1] : places[-1] + most]


def sequences_of(count: int, rate: float) -> list[Sequence]:
    sequences = []
    for number in range(count):
        sequence = new_sequence(number, Request((1, 2, 3, 4, 1, 2, 3), SamplingParams()))
        sequence.ngrams.rate = rate
        sequences.append(sequence)
    return sequences


def proposed(drafts: Drafts[Sequence], count: int, rate: float) -> int:
    sequences = sequences_of(count, rate)
    drafts.propose(sequences, lambda _: 8)
    assert all(list(s.ids[7:]) == ([4, 1, 2, 3] * 2)[: s.drafted] for s in sequences)
    return sum(s.drafted for s in sequences)


def timed(seconds: dict[int, float]) -> Drafts[Sequence]:
    drafts = Drafts[Sequence](8)
    for rows, took in seconds.items():
        for _ in range(2):  # the first one may capture a graph
            drafts.took(DecodeCost(rows, took))
    return drafts


def test_steps_have_as_many_drafts_as_pay() -> None:
    """A step with r rows brings 1 + rate + rate^2 ... tokens."""
    flat, steep = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    assert proposed(timed(flat), 1, 0.95) == 7
    assert proposed(timed(flat), 1, 0.2) == 2  # 1.24 tokens in 1.075 seconds; one draft more brings 0.008 tokens
    assert proposed(timed(flat), 1, 0.01) == 0
    assert proposed(timed(steep), 1, 0.95) == 0
    assert proposed(timed({1: 1.0, 2: 1.8, 4: 2.0, 8: 7.0}), 1, 0.9) == 3  # two rows would not pay
    assert proposed(timed({2: 1.0, 4: 1.1, 8: 3.0}), 2, 0.9) == 2  # of two sequences


def test_guesses_that_do_not_pay_take_a_small_part_of_the_time_until_they_do() -> None:
    drafts, counts = timed({1: 1.0, 2: 1.1, 4: 1.3}), dict.fromkeys((5, 4), 0)
    for token, steps in ((5, 9000), (4, 6000)):  # which follows; 4 is guessed
        for number in range(steps):
            (sequence,) = sequences_of(1, 0.0)
            if not number % 50:
                drafts.begin(1)
            depth = drafts.depth([sequence], 1) if drafts.guesses else 0
            counts[token] += depth
            sequence.guesses = array("q", [4] * depth)
            drafts.check(sequence, [token] * depth)
            drafts.due()
            drafts.took(DecodeCost(1, 1.0, Guessed(depth, depth, 0.2 * depth)))
    assert 0.002 < 0.2 * counts[5] / 9000 < 0.01
    assert counts[4] > 3000
    assert drafts.depth([], 1) == 0
    assert not drafts.guesses


def test_drafts_end_where_they_leave_the_grammar() -> None:
    follows, free = sequences_of(2, 0.9)  # of which 4, 1, 2, 3 came before
    follows.matcher = Matcher(LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex("\x04[\x01-\x05]\x03")))
    FreeDrafts(8).propose([follows, free], lambda _: 4)
    assert [s.drafted for s in (follows, free)] == [2, 4]
