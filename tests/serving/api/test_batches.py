"""Files of requests: /v1/files, /v1/batches, and `umbra run-batch`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.command import umbra
from tests.serving.api.front import Server, run
from umbra.serving.api.auth import ApiKeys
from umbra.serving.api.batches import parsed

CHAT = "/v1/chat/completions"


def lines(*bodies: dict[str, Any], url: str = CHAT) -> bytes:
    named = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in named)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo_chat", "messages": [{"role": "user", "content": "Hi"}], **fields}


def test_the_clients_batch_is_answered() -> None:
    """A wrong request is in the file of errors, and only the key that has sent a file may read it."""
    asked = lines(chat(), chat(max_tokens=2), chat(temperature=-1), chat(stream=True))

    async def scenario(server: Server) -> None:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=300) as client,
            openai.AsyncOpenAI(base_url=url, api_key="other", max_retries=0, timeout=300) as stranger,
        ):
            file = await client.files.create(file=("in.jsonl", asked), purpose="batch")
            assert (file.bytes, file.filename) == (len(asked), "in.jsonl")
            assert (await client.files.content(file.id)).content == asked
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
            )
            while batch.status not in ("completed", "failed"):
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
            assert batch.output_file_id
            assert batch.error_file_id
            answered = (await client.files.content(batch.output_file_id)).text.splitlines()
            said = {(a := json.loads(line))["custom_id"]: a["response"]["body"] for line in answered}
            assert [said[id]["choices"][0]["message"]["content"] for id in ("r0", "r1")] == ["Hello!", "He"]
            failed = (await client.files.content(batch.error_file_id)).text.splitlines()
            errors = {(a := json.loads(line))["custom_id"]: a["response"]["body"]["error"]["param"] for line in failed}
            assert errors == {"r2": "temperature", "r3": "stream"}
            assert [b.id async for b in client.batches.list()] == [batch.id]
            with pytest.raises(openai.NotFoundError):
                await stranger.files.retrieve(file.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.batches.retrieve(batch.id)
            assert (await client.files.delete(file.id)).deleted
            assert len([f async for f in client.files.list()]) == 2
            assert {submit.priority for submit in server.engine.submitted} == {1 << 31}

    run(scenario, keys=ApiKeys.of([b"key", b"other"]))


def test_a_batch_is_cancelled_with_the_answers_so_far() -> None:
    async def scenario(server: Server) -> None:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=300) as client:
            asked = lines(chat(max_tokens=1), *[chat()] * 40)
            file = await client.files.create(file=("in.jsonl", asked), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            while not (batch.request_counts and batch.request_counts.completed):
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            batch = await client.batches.cancel(batch.id)
            while batch.status != "cancelled":
                await asyncio.sleep(0.01)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id
            assert batch.request_counts
            assert batch.request_counts.completed < 41

    run(scenario, "word " * 100, engine={"step_s": 0.01})


def test_what_is_no_batch() -> None:
    for data, said in (
        (b"", "0 requests are not 1 to"),
        (b"{", "malformed|truncated"),
        (lines({}, url="/v1/embeddings"), "url: /v1/embeddings is not"),
        (lines({}) * 2, "r0: custom_id must be unlike"),
        (b'{"custom_id": "a", "url": "/v1/completions"}', "body"),
    ):
        read, errors = parsed(data)
        assert any(part in errors[0]["message"] for part in said.split("|")), errors
        assert len(read) <= 1

    async def scenario(server: Server) -> None:
        for path, data, param in (
            ("batches", {"input_file_id": "file-x", "endpoint": CHAT}, "input_file_id"),
            ("batches", {"input_file_id": "file-x", "endpoint": "/v1/images"}, "endpoint"),
            ("files", {}, "file"),
            ("embeddings", {"input": "a"}, "model"),
            ("rerank", {"query": "a"}, "model"),
        ):
            reply = await server.ask(f"/v1/{path}", data)
            assert (reply.status // 100, reply.error["param"]) == (4, param)
        assert (await server.ask("/api/embed", {})).json == {
            "error": "demo_chat generates text: it has neither embeddings nor scores"
        }

    run(scenario)


def test_a_file_of_requests_is_answered_by_a_command(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines(chat(model="demo_serve", max_tokens=4), chat(model="demo_serve", top_p=5)))
    said = umbra("run-batch", "demo_serve", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    assert "2 of 2 requests answered, 1 with errors" in said.stdout
    assert said.returncode == 0
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {a["custom_id"]: a["response"]["status_code"] for a in answers} == {"r0": 200, "r1": 400}
