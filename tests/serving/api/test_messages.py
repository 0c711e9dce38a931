"""Messages on the socket: what stands in their bytes, what may be left out, and what is no message."""

import inspect
from typing import Any

import msgspec
import pytest

from executor.engine.request import SamplingParams
from serving.api import anthropic, fields, openai_chat, openai_completions, responses, tokenizing
from serving.ranks import messages
from serving.ranks.messages import (
    Abort,
    Fatal,
    Grammar,
    Group,
    Message,
    Out,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Residency,
    Row,
    Running,
    Sampling,
    State,
    Stop,
    Submit,
    Tick,
    ToEngine,
    ToFront,
    TokenLogprob,
    TopToken,
    Watch,
)

SUBMIT = {"type": "Submit", "id": 1, "ids": [2, 3], "sampling": {"max_tokens": 4}}
RUNNING = {"id": 5, "prompt": 40, "cached": 60, "generated": 20, "longest": 140, "preemptions": 0}
STATE = {
    "type": "State", "step": 9, "waiting": 2, "running": [RUNNING],
    "groups": [{"held": 10, "promised": 2, "kept": 30}], "preemptions": 1,
}  # fmt: skip
READY = {
    "type": "Ready", "longest": 416, "batch_size": 4, "vocabulary": 96, "page_size": 16, "pages": 50, "groups": 2,
    "stop_ids": [0], "prefill_rate": 100.0,
}  # fmt: skip
WRITTEN: list[tuple[Any, dict[str, Any]]] = [  # messages, and all that is written of them
    (Submit(1, [2, 3], Sampling(4)), SUBMIT),
    (Submit(1, [2, 3], Sampling(4), 5, b"a"), SUBMIT | {"priority": 5, "salt": b"a"}),
    (Abort(7), {"type": "Abort", "id": 7}),
    (Stop(), {"type": "Stop"}),
    (Ping(8), {"type": "Ping", "number": 8}),
    (Watch(False), {"type": "Watch", "residency": False}),
    (Progress("loading", 0.0), {"type": "Progress", "stage": "loading", "share": 0.0}),
    (Ready(416, 4, 96, 16, 50, 2, [0], 100.0), READY),
    (Ready(416, 4, 96, 16, 50, 2, [0], 100.0, "r"), READY | {"results": "r"}),
    (Out(3, [Row(1, [7])]), {"type": "Out", "step": 3, "rows": [{"id": 1, "tokens": [7]}]}),
    (
        Out(3, [Row(1, [7], "stop", 4, [TokenLogprob(-1.0, [TopToken(7, -1.5)])], [TokenLogprob(-2.0, [])], 0.5)]),
        {"type": "Out", "step": 3, "rows": [{
            "id": 1, "tokens": [7], "finish": "stop", "found": 4, "logprobs": [[-1.0, [[7, -1.5]]]],
            "prompt_logprobs": [[-2.0, []]], "queued_s": 0.5,
        }]},
    ),
    (Refused(1, "no"), {"type": "Refused", "id": 1, "reason": "no"}),
    (State(9, 2, [Running(**RUNNING)], [Group(10, 2, 30)], 1), STATE),
    (Residency(1, 2, b"a", b"b"), {"type": "Residency", "layers": 1, "experts": 2, "resident": b"a", "heat": b"b"}),
    (Pong(1, 2), {"type": "Pong", "number": 1, "step": 2}),
    (Fatal("it broke"), {"type": "Fatal", "reason": "it broke"}),
    (
        Tick(1, 2, None, 4, [Stop()]),
        {
            "type": "Tick", "number": 1, "digest": 2, "mixed_tokens": None, "expert_pages": 4,
            "events": [{"type": "Stop"}],
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "written"), WRITTEN)
def test_a_message_is_a_map_of_what_is_not_as_usual(message: Message, written: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(body) == written
    kinds = Tick if isinstance(message, Tick) else ToEngine | ToFront
    read: Any = msgspec.msgpack.decode(body, type=kinds)
    assert read == message
    unknown = msgspec.msgpack.encode({**written, "more": 1})
    with pytest.raises(msgspec.ValidationError, match="unknown field `more`"):
        msgspec.msgpack.decode(unknown, type=kinds)


def test_numbers_of_a_state_are_nothing_until_they_are_told() -> None:
    state = msgspec.convert(STATE, State)
    given = {"type", "step", "waiting", "running", "groups", "preemptions"}
    rest = {name: getattr(state, name) for name in State.__struct_fields__ if name not in given}
    assert len(rest) == 14
    assert {name: value for name, value in rest.items() if value not in (0, [])} == {}
    assert (Submit(1, [2], Sampling(3)).priority, Submit(1, [2], Sampling(3)).salt) == (0, b"")
    row = Row(1, [2])
    assert (row.finish, row.found, row.logprobs, row.prompt_logprobs, row.queued_s) == ("", 0, [], [], 0.0)


def test_settings_that_are_left_out_are_the_engine_s() -> None:
    ours, engine = Sampling(max_tokens=32), SamplingParams()
    for name in Sampling.__struct_fields__:
        assert getattr(ours, name) == getattr(engine, name), name
    assert msgspec.to_builtins(ours) == {"max_tokens": 32}
    assert (ours.temperature, ours.top_p, ours.repetition_penalty, ours.ignore_eos) == (0.0, 1.0, 1.0, False)


@pytest.mark.parametrize("name", ["longest", "batch_size", "vocabulary", "page_size", "pages", "groups"])
def test_a_model_without_room_is_no_message(name: str) -> None:
    assert getattr(msgspec.convert(READY | {name: 1}, Ready), name) == 1
    with pytest.raises(msgspec.ValidationError, match=rf"Expected `int` >= 1 - at `\$\.{name}`"):
        msgspec.convert(READY | {name: 0}, Ready)


def structs(module: Any) -> list[type[msgspec.Struct]]:
    """Those that a module defines."""
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
    return [kind for kind in found if issubclass(kind, msgspec.Struct)]


MADE: list[msgspec.Struct] = [
    *(message for message, _ in WRITTEN), Message(), Sampling(1), Grammar("regex", "a"), Row(1, [2]),
    TopToken(1, 0.0), TokenLogprob(0.0, []), Group(1, 2, 3), Running(**RUNNING),
    openai_chat.Delta(0, "content"), openai_completions.Part(0, "text"),
]  # fmt: skip


def test_what_has_been_said_stays_as_it_is() -> None:
    """One thread makes messages and another sends them."""
    assert {*structs(messages)} <= {type(made) for made in MADE}
    for made in MADE:
        assert type(made).__struct_config__.frozen, type(made)


def test_fields_of_requests_have_no_order() -> None:
    """A field that is added between others changes nothing for who makes a request."""
    found = [kind for module in (anthropic, fields, responses, tokenizing) for kind in structs(module)]
    found += [openai_chat.ChatRequest, openai_completions.CompletionRequest]
    assert len(found) == 20
    for kind in found:
        with pytest.raises(TypeError, match="Extra positional arguments provided"):
            kind(None)
