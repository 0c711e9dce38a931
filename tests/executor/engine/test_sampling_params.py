"""Biases, penalties, min-p, grammars and log-probabilities: what they do to logits, and what a request gets."""

import json
import math
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from executor.config.load import load_case
from executor.engine.loop import Loop
from executor.engine.request import LARGEST_SEED, Event, Grammar, Request, SamplingParams
from executor.engine.sampling import choices_of
from executor.engine.sequence import new_sequence
from executor.model_runner import ModelRunner
from ops.sampling import adjust, filtered_probabilities
from tests.tiny import make_runner, oracle_logits, save_tiny, tiny_case
from umbra.errors import UserError

V = 11


@settings(deadline=None)
@given(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=9), st.lists(st.integers(0, V - 1), max_size=9),
    st.floats(-2, 2), st.floats(-2, 2), st.floats(0.5, 2), st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100)),
)  # fmt: skip
def test_biases_and_penalties_are_those_of_the_api(
    prompt: list[int],
    generated: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    sequence = new_sequence(0, Request(tuple(prompt), params))
    sequence.ids.extend(generated)
    logits = torch.linspace(-3, 3, V)
    expected = logits.double().tolist()
    for token in range(V):
        expected[token] += bias.get(token, 0)
        if token in prompt + generated:
            expected[token] *= repetition if expected[token] <= 0 else 1 / repetition
        count = generated.count(token)
        expected[token] -= count * frequency + (presence if count else 0)
    adjust(logits, choices_of(sequence)[0])
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-4)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(0, 1), st.floats(0.2, 3))
def test_min_p_keeps_what_is_probable_enough(logits: list[float], min_p: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_p=min_p)
    [row] = filtered_probabilities(torch.tensor([logits]), [params]).double()
    plain = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1)
    for found, probability in zip(row, plain, strict=True):
        if abs(probability / plain.max() - min_p) > 1e-5:
            assert (found > 0) == (probability >= min_p * plain.max())
    assert math.isclose(row.sum(), 1, rel_tol=1e-5)


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
]


@pytest.mark.parametrize(("name", "taken", "refused"), BOUNDS, ids=[name for name, *_ in BOUNDS])
def test_settings_have_bounds(name: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(UserError, match=f"^{name}: "):
            SamplingParams(**{name: value})


def drain(loop: Loop) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    while not loop.idle:
        for event in loop.step():
            found.setdefault(event.id, []).append(event)
    return found


@pytest.mark.parametrize("chunk", [0, 5])
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, chunk: int) -> None:
    """Of prompts and answers, in steps that requests without them share."""
    oracle = save_tiny(tmp_path / "model", eos_token_id=None)
    data = {"batch_size": 3, "chunked_prefill_size": chunk}
    loop = make_runner(tiny_case(tmp_path, tmp_path / "model", data_config=data), tmp_path).loop
    prompts = [tuple(range(3, 22)), (7, 9), (5, 17, 3, 88, 21)]
    wanted = [(2, 5), (None, None), (0, 1)]
    ids = [
        loop.submit(Request(p, SamplingParams(max_tokens=4, prompt_logprobs=of_prompt, logprobs=of_answer))).id
        for p, (of_prompt, of_answer) in zip(prompts, wanted, strict=True)
    ]
    found = drain(loop)
    for id, prompt, (of_prompt, of_answer) in zip(ids, prompts, wanted, strict=True):
        events = found[id]
        text = [*prompt, *(token for event in events for token in event.tokens)]
        assert len(text) == len(prompt) + 4
        expected = oracle_logits(oracle, text).log_softmax(-1)
        given = [*events[0].prompt_logprobs, *(p for event in events for p in event.logprobs)]
        assert not any(event.prompt_logprobs for event in events[1:])
        assert len(given) == (len(text) - 1 if of_answer is not None else 0)
        for place, found_one in enumerate(given):
            assert found_one.logprob == pytest.approx(float(expected[place, text[place + 1]]), abs=1e-4)
            most = of_prompt if place < len(prompt) - 1 else of_answer
            assert most is not None
            assert [t for t, _ in found_one.top] == expected[place].topk(most).indices.tolist()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    case = load_case("demo", ["max_new_tokens=120", "warm_up=false", "exe_mode=eager"])
    return make_runner(case, tmp_path_factory.mktemp("demo"))


def answer(demo: ModelRunner, **options: Any) -> tuple[str, str]:
    from text.tokenizer import Tokenizer

    tokenizer = Tokenizer(demo.folder)
    ids = tuple(tokenizer.encode("Emma was", False))
    id = demo.loop.submit(Request(ids, SamplingParams(**{"max_tokens": 100} | options))).id
    events = drain(demo.loop)[id]
    return tokenizer.decode([t for e in events for t in e.tokens]), events[-1].finish_reason


def test_an_answer_follows_a_regular_expression(demo: ModelRunner) -> None:
    text, reason = answer(demo, grammar=Grammar("regex", "[0-9]{3}-(yes|no)"))
    assert re.fullmatch("[0-9]{3}-(yes|no)", text)
    assert reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_a_json_schema(demo: ModelRunner, seed: int) -> None:
    schema = {
        "type": "object", "additionalProperties": False, "required": ["name", "age"],
        "properties": {
            "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99, "minimum": 1},
        },
    }  # fmt: skip
    text, reason = answer(demo, grammar=Grammar("json", json.dumps(schema)), temperature=1.0, seed=seed)
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert 1 <= value["age"] <= 99
    assert reason == "stop"
