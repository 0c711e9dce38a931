"""Settings of requests have bounds; log-probabilities are right; an answer follows its grammar."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from tests.tiny import make_runner, oracle_logits, save_tiny, tiny_case
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.grammar import LARGEST, Grammars, Matcher
from umbra.executor.engine.schedule.request import LARGEST_SEED, Event, Grammar, Request, SamplingParams
from umbra.executor.engine.step.loop import Loop
from umbra.executor.model_runner import ModelRunner
from umbra.models.tokenizers import tokenizer_in

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [  # what is taken, and what is not
    ("max_tokens", [1], [0, True, 1.0]),
    ("temperature", [0, 0.0], [-0.1, math.nan, math.inf, "1", True]),
    ("top_k", [None, 1], [0, 1.0]),
    ("top_p", [0, 1], [-0.1, 1.1, math.nan]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("seed", [None, 0, LARGEST_SEED], [-1, LARGEST_SEED + 1, 1.0]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1, "1"]),
    ("repetition_penalty", [0.01, 100], [0.009, 101]),
    ("logit_bias", [{0: -100}, {0: 100}], [{-1: 1}, {0: -101}, {0: 101}, {"0": 1}, {0: "1"}]),
    ("logprobs", [None, 0, 20], [-1, 21, True]),
    ("prompt_logprobs", [None, 0, 20], [-1, 21]),
    ("stop_token_ids", [(), (1, 2)], [(1, "2"), (1.0,)]),
    ("min_tokens", [0, 32], [-1, 33, 1.0]),
]


@pytest.mark.parametrize(("name", "taken", "refused"), BOUNDS, ids=[name for name, *_ in BOUNDS])
def test_settings_have_bounds(name: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(UserError, match=f"^{name}: "):
            SamplingParams(**{name: value})


def drain(loop: Loop) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    while not loop.idle:
        for event in loop.step():
            events.setdefault(event.id, []).append(event)
    return events


def test_log_probabilities_are_those_of_transformers(tmp_path: Path) -> None:
    """Prompts come in chunks, and requests without log-probabilities share the steps."""
    oracle = save_tiny(tmp_path / "model", eos_token_id=None)
    data = {"batch_size": 3, "chunked_prefill_size": 5}
    loop = make_runner(tiny_case(tmp_path, tmp_path / "model", data_config=data), tmp_path).loop
    prompts = [tuple(range(3, 22)), (7, 9), (5, 17, 3, 88, 21)]
    wanted = [(2, 5), (None, None), (0, 1)]
    ids = [
        loop.submit(Request(p, SamplingParams(max_tokens=4, prompt_logprobs=of_prompt, logprobs=of_answer))).id
        for p, (of_prompt, of_answer) in zip(prompts, wanted, strict=True)
    ]
    by_request = drain(loop)
    for id, prompt, (of_prompt, of_answer) in zip(ids, prompts, wanted, strict=True):
        events = by_request[id]
        text = [*prompt, *(token for event in events for token in event.tokens)]
        assert len(text) == len(prompt) + 4
        expected = oracle_logits(oracle, text).log_softmax(-1)
        given = [*events[0].prompt_logprobs, *(p for event in events for p in event.logprobs)]
        assert not any(event.prompt_logprobs for event in events[1:])
        assert len(given) == (len(text) - 1 if of_answer is not None else 0)
        for position, found_one in enumerate(given):
            assert found_one.logprob == pytest.approx(float(expected[position, text[position + 1]]), abs=1e-4)
            most = of_prompt if position < len(prompt) - 1 else of_answer
            assert most is not None
            assert [t for t, _ in found_one.top] == expected[position].topk(most).indices.tolist()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    case = load_case("demo", ["max_new_tokens=120", "warm_up=false", "exe_mode=eager"])
    return make_runner(case, tmp_path_factory.mktemp("demo"))


def answer(demo: ModelRunner, **options: Any) -> tuple[str, str]:

    tokenizer = tokenizer_in(demo.folder)
    ids = tuple(tokenizer.encode("Emma was", False))
    id = demo.loop.submit(Request(ids, SamplingParams(**{"max_tokens": 100} | options))).id
    events = drain(demo.loop)[id]
    return tokenizer.decode([t for e in events for t in e.tokens]), events[-1].finish_reason


def test_no_token_ends_an_answer_that_is_too_short(demo: ModelRunner) -> None:
    def tokens(**options: Any) -> list[int]:
        id = demo.loop.submit(Request((5, 17, 3), SamplingParams(max_tokens=9, ignore_eos=True, **options))).id
        return [token for event in drain(demo.loop)[id] for token in event.tokens]

    free = tokens()
    ends = tuple(set(free[2:]) - set(free[:2]))  # the first comes third
    assert tokens(stop_token_ids=ends) == tokens(stop_token_ids=ends, min_tokens=2) == free[:3]
    longer = tokens(stop_token_ids=ends, min_tokens=4)
    assert longer[:2] == free[:2]
    assert not set(longer[:4]) & set(ends)
    with pytest.raises(UserError, match="min_tokens: an answer that follows a grammar ends with it"):
        SamplingParams(min_tokens=1, grammar=Grammar("regex", "a"))


def test_an_answer_follows_a_json_schema(demo: ModelRunner) -> None:
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "age"],
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 99, "minimum": 1},
        },
    }
    text, reason = answer(demo, grammar=Grammar("json", json.dumps(schema)), temperature=1.0, seed=1)
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert 1 <= value["age"] <= 99
    assert reason == "stop"


BYTES = Grammars(LLTokenizer("byte"))


def matcher(kind: str, text: str) -> Matcher:
    return BYTES.matcher(Grammar(kind, text))


def follows(matcher: Matcher, text: str) -> list[bool]:
    return [matcher.accept(byte) for byte in text.encode()]


def test_json_has_no_spaces_between_its_parts(capfd: pytest.CaptureFixture[str]) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    for text, length in (('{"a":true', 9), ('{"a": true', 5), ('{ "a":true', 1), ('{"a":true }', 9)):
        assert sum(follows(matcher("json", schema), text)) == length
    assert capfd.readouterr() == ("", "")  # what a model gets wrong is not logged


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json", "{"), ("json", '{"type": 7}'), ("regex", "(["), ("lark", "start: no"), ("regex", "a" * (LARGEST + 1))],
)
def test_what_is_wrong_is_said_in_one_line(kind: str, text: str) -> None:
    with pytest.raises(UserError, match=r"^grammar: ") as raised:
        matcher(kind, text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 300 + len("grammar: ")


def test_an_answer_with_a_grammar_needs_an_end() -> None:
    with pytest.raises(UserError, match="austen_moe: names no end-of-sequence token, which an answer with a grammar"):
        Grammars.read(ROOT / "checkpoints" / "austen_moe", 9, [])
