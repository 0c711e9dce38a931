"""What is not well-formed in an answer is found, in streams of all APIs of the server and in whole answers."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving import answers
from tests.serving.answers import PATHS, Answer
from tests.serving.api.front import serving

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi", "logprobs": 1, "n": 2, "seed": 1},
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"input": "Hi", "store": False},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20},
}


pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def bodies() -> dict[str, bytes]:
    """What the server answers, as streams and whole."""

    async def run() -> dict[str, bytes]:
        async with serving("Hello!") as server:
            return {
                api: (await server.ask(PATHS[api], body | {"stream": True})).body for api, body in BODIES.items()
            } | {f"{api}, whole": (await server.ask(PATHS[api], body)).body for api, body in BODIES.items()}

    return asyncio.run(run())


def read(api: str, data: bytes, cut: bool = False) -> Answer:
    return answers.streamed(api, data, cut)


@pytest.mark.parametrize("api", BODIES)
def test_streams_and_whole_answers_agree(bodies: dict[str, bytes], api: str) -> None:
    stream, whole = read(api, bodies[api]), answers.whole(api, json.loads(bodies[f"{api}, whole"]))
    assert stream.faults == whole.faults == []
    assert stream.texts == whole.texts == dict.fromkeys(range(BODIES[api].get("n", 1)), "Hello!")
    assert stream.ends == whole.ends
    assert set(stream.ends.values()) == {"stop"}
    assert stream.logprobs == whole.logprobs
    assert len(stream.ids) == len(whole.ids) == 1
    assert whole.tokens
    assert stream.tokens in (None, whole.tokens)


@pytest.mark.parametrize("api", BODIES)
def test_a_stream_cut_anywhere(bodies: dict[str, bytes], api: str) -> None:
    """To one who leaves, the beginning of a stream is well-formed; else only the whole stream is."""
    data = bodies[api]
    for end in range(len(data)):
        seen = read(api, data[:end], cut=True)
        assert seen.faults == []
        assert all("Hello!".startswith(text) for text in seen.texts.values())
        if end % 7 == 0:
            assert read(api, data[:end]).faults, end


def changes(stream: bytes) -> dict[str, bytes]:
    """Streams in which one block is lost, comes twice, or comes before the one that it follows."""
    blocks = stream.split(b"\n\n")[:-1]
    found = {}
    for place, block in enumerate(blocks):
        head, tail = blocks[:place], blocks[place + 1 :]
        found[f"without {place}"] = [*head, *tail]
        found[f"{place} twice"] = [*head, block, block, *tail]
        if tail and block != tail[0]:
            found[f"{place} and {place + 1} exchanged"] = [*head, tail[0], block, *tail[1:]]
    return {name: b"".join(block + b"\n\n" for block in blocks) for name, blocks in found.items()}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_blocks_that_are_lost_or_out_of_order(bodies: dict[str, bytes], api: str) -> None:
    for name, data in changes(bodies[api]).items():
        assert read(api, data).faults or read(api, data).texts != {0: "Hello!"}, name


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "a block is no event": lambda data: data.replace(b"data: ", b"date: ", 1),
    "events follow [DONE]": lambda data: data + data,
    "choice 0 goes on after its end": lambda data: data.replace(b'"finish_reason":null', b'"finish_reason":"stop"', 1),
    "finish reason odd": lambda data: data.replace(b'"finish_reason":"stop"', b'"finish_reason":"odd"'),
    "chunks of several answers": lambda data: data.replace(b'"model":"', b'"model":"x', 1),
    "the last event is not complete": lambda data: data[:-1],
}


@pytest.mark.parametrize("fault", SPOILT)
def test_spoilt_streams(bodies: dict[str, bytes], fault: str) -> None:
    assert fault in read("chat", SPOILT[fault](bodies["chat"])).faults


def test_errors(bodies: dict[str, bytes]) -> None:
    stream = bodies["chat"].split(b"\n\n")[0] + b'\n\ndata: {"error":{"message":"m","type":"t","code":"c"}}\n\n'
    assert (read("chat", stream).error, read("chat", stream).faults) == ("c", [])
    assert answers.failed({"error": {"message": "m", "type": "t", "code": None}}).error == "t"
    assert answers.failed({"detail": "m"}).faults
