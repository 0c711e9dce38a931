"""Requests that the front refuses or ends, and its answers while ranks load, wait, hang or die."""

import asyncio
import gc
import json
import threading
from typing import Any

import pytest

from tests.serving.api.front import Connection, Server, run, until
from tests.serving.api.test_chat import TOOL
from umbra.base.files import ROOT
from umbra.serving.api import (
    anthropic,
    app,
    body,
    compiling,
    fields,
    front,
    openai_completions,
    responses,
    schemas,
    server,
    sse,
    structured,
)
from umbra.serving.api.errors import ApiError
from umbra.serving.ranks import client

LONG = "word " * 200


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def named(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


# What grammars may be is in test_structured.
WRONG: list[tuple[dict[str, Any], str]] = [({"temperature": "hot"}, "temperature")]
WRONG += [({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"), ({"max_tokens": 0}, "max_tokens")]
WRONG += [({"max_completion_tokens": 1.5}, "max_completion_tokens"), ({"n": 0}, "n"), ({"n": 65}, "n")]
WRONG += [({"stop": ["x"] * 17}, "stop"), ({"stop": ""}, "stop"), ({"logit_bias": {"x": 1}}, "logit_bias")]
WRONG += [({"logit_bias": {"1": 101}}, "logit_bias"), ({"logit_bias": {"99999": 1}}, "logit_bias")]
WRONG += [({"priority": (1 << 31) + 1}, "priority"), ({"stop_token_ids": [1 << 70]}, "stop_token_ids")]
WRONG += [({"top_k": -5}, "top_k"), ({"top_logprobs": 1}, "top_logprobs")]
WRONG += [({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"min_p": -0.5}, "min_p")]
WRONG += [({"stream_options": {"include_usage": True}}, "stream_options"), ({"messages": []}, "messages")]
WRONG += [({"messages": [{"role": "user", "content": ""}] * 4097}, "messages"), ({"messages": "Hi"}, "messages")]
WRONG += [(said(role="king", content=""), "messages[0].role"), (said(role="user", content=5), "messages[0].content")]
WRONG += [(said(role="user", content=[{"type": "image_url"}]), "messages[0].content[0]")]
WRONG += [(said(role="user", content=[{"text": ""}, {"type": "text", "text": 5}]), "messages[0].content[1].text")]
WRONG += [(said(role="user", content="", name=5), "messages[0].name")]
WRONG += [(said(role="tool", content="", tool_call_id=5), "messages[0].tool_call_id")]
WRONG += [(said(role="assistant", reasoning_content=5), "messages[0].reasoning_content")]
WRONG += [(said(role="assistant", tool_calls=[{}]), "messages[0].tool_calls[0]")]
WRONG += [({"chat_template_kwargs": {"nothing": True}}, "chat_template_kwargs")]
WRONG += [({"chat_template": "{{"}, "chat_template")]
WRONG += [({"chat_template_kwargs": {"chat_template": "{{"}}, "chat_template_kwargs")]
WRONG += [({"tools": [TOOL] * 129}, "tools"), ({"tools": [{"type": "custom"}]}, "tools[0].type")]
WRONG += [({"tools": [TOOL, TOOL]}, "tools[1].function.name"), ({"tools": [named("a b")]}, "tools[0].function.name")]
WRONG += [({"tools": [named("a", parameters=["x"])]}, "tools[0].function.parameters")]
WRONG += [({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice")]
WRONG += [({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice")]
WRONG += [({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice")]
WRONG += [
    ({"tools": [named("a", parameters={"type": "bogus"})], "tool_choice": "required"}, "tools[0].function.parameters")
]
WRONG += [({"guided_json": {}, "guided_regex": "a"}, "guided_regex"), ({"guided_regex": "("}, "guided_regex")]


def test_a_wrong_field_is_named() -> None:
    async def scenario(server: Server) -> None:
        for given, param in WRONG:
            reply = await server.chat(**given)
            assert (reply.status, reply.error["param"]) == (400, param), reply.body
            assert reply.error["type"] == "invalid_request_error"
        assert not server.engine.submitted

    run(scenario)


def test_a_slip_of_the_pen_is_told_from_another_engines_field() -> None:
    async def scenario(server: Server) -> None:
        for path, name, right in (
            ("chat/completions", "max_token", "max_tokens"),
            ("chat/completions", "topLogprobs", "top_logprobs"),
            ("completions", "temprature", "temperature"),
            ("completions", "prompts", "prompt"),
            ("responses", "instruction", "instructions"),
            ("messages", "stop_sequence", "stop_sequences"),
        ):
            error = (await server.ask(f"/v1/{path}", {name: 1})).json["error"]
            assert error["message"] == f"{name}: there is no such field: write {right}"
        assert (await server.chat(top_a=0.5, cache_prompt=True, repeat_last_n=64, max_prompt_tokens=9)).status == 200

    run(scenario)


def test_a_model_that_cannot_reason_ignores_it_and_says_so() -> None:
    async def scenario(server: Server) -> None:
        assert server.front.text
        reasons = server.front.text.reasons
        switch, wanted = {"enable_thinking": False}, {"enable_thinking": not reasons, "reasoning_effort": "low"}
        budget = {"type": "disabled" if reasons else "enabled", "budget_tokens": 1024}
        asks: list[tuple[str, dict[str, Any], str]] = [
            ("chat/completions", wanted, "enable_thinking reasoning_effort"),
            ("chat/completions", {"thinking": budget}, "thinking"),
            ("chat/completions", {"thinking": reasons}, ""),
            ("chat/completions", {"chat_template_kwargs": switch, "stream": True}, "chat_template_kwargs"),
            ("messages", {"thinking": budget, "max_tokens": 9}, "thinking"),
        ]
        for path, asked, names in asks:
            reply = await server.ask(f"/v1/{path}", said(role="user", content="Hi") | asked)
            assert reply.status == 200, reply.body
            assert ("warning" in reply.headers) == bool(names)
            assert all(name in reply.headers["warning"] for name in names.split())
        assert (await server.chat(chat_template_kwargs={"nothing": True})).status == 400

    run(scenario, family="kimi_k2")


def test_fields_that_ask_for_nothing_are_taken() -> None:
    async def scenario(server: Server) -> None:
        assert (await server.chat(top_k=1 << 70, seed=1 << 70, max_tokens=1 << 70, made_up=1)).status == 200
        assert server.front.unread == {"made_up"}
        for path, asked, known in (
            ("completions", {"prompt": "a"}, fields.KNOWN),
            ("responses", {"input": "a"}, responses.KNOWN),
            ("messages", {**said(role="user", content="a"), "max_tokens": 1}, anthropic.KNOWN),
        ):
            for name, idle in {**known.ignored, **known.refused}.items():
                for value in [None, *idle]:
                    reply = await server.ask(f"/v1/{path}", asked | {name: value})
                    assert (reply.status, "warning" in reply.headers) == (200, False), name
                reply = await server.ask(f"/v1/{path}", asked | {name: ["something"]})
                assert reply.status == (400 if name in known.refused else 200)
                if name in known.refused:
                    assert reply.json["error"]["message"].startswith(f"{name}: ")
                else:
                    assert reply.headers["warning"].startswith(f'299 umbra "{name}: ')

    run(scenario)


def test_what_is_no_request() -> None:
    async def scenario(server: Server) -> None:
        path = "/v1/completions"
        for raw, status in [
            (b"", 400),
            (b"{", 400),
            (b"[]", 400),
            (b"\xff", 400),
            (b'"x"', 400),
            (b"{}", 400),
            (b"[" * 10**6, 400),
            (b'{"prompt":' + b"[" * 80 + b"]" * 80 + b"}", 400),
            (b"x" * (9 << 20), 413),
        ]:
            reply = await server.ask(path, raw=raw)
            assert reply.status == status, raw[:20]
            assert reply.error["type"] == "invalid_request_error"
        prompts: list[Any] = [None, [], "", [[]], ["a", 5], [1.5], [True], [10**6], ["x"] * 65]
        for prompt in prompts:
            reply = await server.complete(prompt)
            assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert (await server.ask("/v1/nothing", {})).error["type"] == "not_found_error"
        assert (await server.get(path)).status == 405
        assert (await server.complete("x", model="other")).error["code"] == "model_not_found"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"nonsense\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert (await server.get("/health")).status == 200

    run(scenario)


def test_the_description_has_all_routes_and_its_examples_are_answered() -> None:
    async def scenario(server: Server) -> None:
        paths = (await server.get("/openapi.json")).json["paths"]
        described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
        assert described == {(method, path.replace(":path", "")) for method, path, _ in app.ROUTES}
        examples = [
            (path, example["value"])
            for path, methods in paths.items()
            if "requestBody" in methods.get("post", {})
            for example in methods["post"]["requestBody"]["content"]["application/json"]["examples"].values()
        ]
        assert len(examples) > 10
        for path, example in examples:
            assert (await server.ask(path, example)).status == (404 if path == "/v1/batches" else 200)  # it has no file

    run(scenario)


def test_limits_are_those_of_the_documentation() -> None:
    """Clients rely on them."""
    text = " ".join((ROOT / "docs" / "serving.md").read_text().split())
    for said in (
        f"or up to {openai_completions.MOST_PROMPTS} of either",
        f"if absent, {openai_completions.MAX_TOKENS} for completions",
        f"up to {fields.MOST_CHOICES} answers; the prompt is computed once",
        f"up to {fields.MOST_STOPS} strings of up to {fields.LONGEST_STOP} characters",
        f"A comment follows after {sse.PING_S:g} s without an event",
        f"a client leaves {server.UNREAD >> 10} KiB of its answer unread for {server.UNREAD_S:g} s",
        f"longer than {server.HEADER_S:g} s for headers or {body.BODY_S:g} s for a body",
        f"more than {server.MOST_CONNECTIONS:,} connections are open",
        f"Bodies have at most {body.LARGEST_BODY >> 20} MiB and {fields.DEEPEST} levels",
        f"grammars have at most {structured.LARGEST >> 10} KiB, {schemas.DEEPEST} levels and",
        f"levels and {schemas.MOST_PROPERTIES} properties",
        f"that ends after {compiling.SECONDS:g} s or {compiling.MEMORY >> 20} MB",
        f"if the ranks answered in the last {client.FRESH_S:g} s",
    ):
        assert said in text, said
    exact = [body.LARGEST_BODY, server.UNREAD, structured.LARGEST, compiling.MEMORY, fields.LARGEST_PRIORITY]
    assert exact == [8 * 1024**2, 256 * 1024, 64 * 1024, 512 * 1024**2, 2**31]


def test_requests_and_models_have_names() -> None:
    async def scenario(server: Server) -> None:
        for given in ("a b", "x" * 128):
            assert (await server.get("/health", headers={"x-request-id": given})).headers["x-request-id"] == given
        for given in ("x" * 129, "a\x01b"):
            reply = await server.get("/v1/models", headers={"x-request-id": given})
            assert reply.status == 400 or reply.headers["x-request-id"].startswith("req_")
        assert [card["id"] for card in (await server.get("/v1/models")).json["data"]] == ["gpt", "claude"]
        assert (await server.get("/v1/models/claude")).json["id"] == "claude"
        assert (await server.get("/v1/models/demo_chat")).json["max_model_len"] == 2000
        for name, status in (("gpt", 200), ("claude", 200), ("demo_chat", 200), ("", 200), ("other", 404)):
            assert (await server.chat(model=name)).status == status

    run(scenario, served_model_name="gpt claude")


def test_work_that_waits_for_threads_is_bounded() -> None:
    async def scenario(server: Server) -> None:
        go = threading.Event()
        work = [asyncio.create_task(server.front.work(go.wait)) for _ in range(front.MOST_JOBS)]
        await asyncio.sleep(0)
        reply = await server.complete()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "queue_full", "1")
        go.set()
        await asyncio.gather(*work)
        assert (await server.complete()).status == 200

    run(scenario)


def test_a_prompt_that_is_too_long() -> None:
    async def scenario(server: Server) -> None:
        for reply in (
            await server.complete("x" * 100),
            await server.complete("x" * 10**6),
            await server.chat("x" * 99),
        ):
            assert reply.status == 400
            assert reply.error["code"] == "context_length_exceeded"
        body = (await server.complete("x" * 90, max_tokens=500)).json
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] == 100

    run(scenario, LONG, engine={"longest": 100})


def test_while_loading() -> None:
    async def scenario(server: Server) -> None:
        await until(lambda: server.front.client.progress.share)
        reply = await server.get("/health/ready")
        assert (reply.status, reply.json["status"], reply.json["progress"]) == (503, "loading", 0.5)
        assert (await server.get("/health")).status == 200
        refused = await server.chat()
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "loading", "5")
        assert "50%" in refused.error["message"]
        server.engine.start()
        await until(lambda: server.front.client.ready)
        assert (await server.chat()).status == 200
        assert (await server.get("/health/ready")).json == {"status": "serving"}

    run(scenario, ready=False)


async def ended(server: Server) -> None:
    """Every trace of all requests is gone, in the front and in the engine."""
    await until(lambda: server.engine.idle and not server.front.limits.open and not server.front.open)
    assert server.front.limits.waiting_tokens == 0
    assert not server.front.client.asked


@pytest.mark.parametrize(("where", "stream"), [("queued", False), ("prefill", True), ("decode", False)])
def test_a_client_that_goes_ends_its_request(where: str, stream: bool) -> None:
    async def scenario(server: Server) -> None:
        engine = server.engine
        others = (
            [] if where != "queued" else [await server.open("/v1/completions", {"prompt": "x", "max_tokens": 9999})]
        )
        await until(lambda: len(engine.running) == len(others))
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        connection = await server.open("/v1/chat/completions", body)
        await until(lambda: len(engine.submitted) == len(others) + 1)
        if where == "decode":
            await until(lambda: engine.running and engine.running[0].tokens)
        connection.kill()
        await until(lambda: len(engine.aborted) == 1)
        assert engine.aborted == [engine.submitted[-1].id]
        for other in others:
            other.kill()
        await ended(server)

    options = {"batch_size": 1, "step_s": 0.01, "longest": 100_000}
    run(scenario, LONG * 10, engine=options | {"prefill_s": 60.0 if where == "prefill" else 0.0})


def test_several_choices_end_together() -> None:
    """When their client goes, or when one of them is refused."""
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 9999}

    async def scenario(server: Server) -> None:
        connection = await server.open("/v1/completions", body)
        await until(lambda: len(server.engine.submitted) == 4)
        connection.kill()
        await ended(server)
        assert len(server.engine.aborted) == 4

    run(scenario, LONG, engine={"step_s": 0.05})

    async def refused(server: Server) -> None:
        assert (await server.ask("/v1/completions", body)).error["message"] == "no room"
        await ended(server)

    run(refused, lambda submit: [97] * 1000 if submit.ids == [97] else "no room", engine={"step_s": 0.05})


def test_a_request_that_waits_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "LOOK_S", 0.05)

    async def scenario(server: Server) -> None:
        long = {"prompt": "x", "max_tokens": 900}
        runs = await server.open("/v1/completions", long)
        await until(lambda: server.engine.running)
        reply = await server.complete("y", stream=True)
        assert (reply.status, reply.error["code"]) == (503, "queue_timeout")
        runs.kill()
        await ended(server)

    # The first request takes longer than the timeout before its first token, but it runs.
    run(scenario, LONG, engine={"batch_size": 1, "prefill_s": 60.0}, queue_timeout_s=0.5)


def test_ranks_that_die_end_all_requests_with_the_truth() -> None:
    async def scenario(server: Server) -> None:
        body = {"prompt": "Hi", "max_tokens": 900}
        streaming = await server.open("/v1/completions", body | {"stream": True})
        waiting = await server.open("/v1/completions", body)
        await streaming.head()
        await streaming.chunk()
        await until(lambda: len(server.engine.running) == 2 and all(s.tokens for s in server.engine.running))
        await server.engine.die("the disk is full")
        while data := await streaming.chunk():
            last = data
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["message"] == "the disk is full"
        assert error["code"] == "engine_gone"
        reply = await waiting.all()
        assert (reply.status, reply.error["message"]) == (500, error["message"])
        assert (await server.get("/health/ready")).status == 503
        assert (await server.complete("x")).status == 503
        metrics = (await server.get("/metrics")).body.decode()
        assert 'request_success_total{finished_reason="error",model_name="demo_chat"} 2.0' in metrics

    run(scenario, LONG, engine={"step_s": 0.01})


def test_ready_says_when_the_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FRESH_S", 0.2)

    async def scenario(server: Server) -> None:
        server.engine.hung = True
        await asyncio.sleep(0.3)
        reply = await server.get("/health/ready")
        assert (reply.status, reply.json["status"]) == (503, "silent")
        assert (await server.get("/health")).status == 200

    run(scenario)


def test_a_quiet_stream_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.1)

    async def scenario(server: Server) -> None:
        reply = await server.complete("x", stream=True)
        assert reply.body.startswith(b": ping\n\n")
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert "".join(c["choices"][0]["text"] for c in reply.events[:-1]) == "Hello!"

    run(scenario, engine={"prefill_s": 0.5})


def test_slow_clients_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_S", 0.3)
    monkeypatch.setattr(server, "UNREAD_S", 0.3)
    monkeypatch.setattr("umbra.serving.api.body.BODY_S", 0.3)

    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        late = await server.open("/v1/completions", raw=b"{", headers={"content-length": "100"})
        assert (await late.all()).status == 408
        # An endless answer that nobody reads.
        body = {"prompt": "x", "max_tokens": 10**6, "stream": True, "ignore_eos": True}
        unread: Connection = await server.open("/v1/completions", body, buffer=4096)
        unread.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: server.engine.submitted)
        await ended(server)
        assert server.engine.aborted == [server.engine.submitted[0].id]

    endless = {"longest": 1 << 30, "width": 64, "step_s": 0.0005}
    run(scenario, lambda submit: [97] * 10_000_000, engine=endless)


def test_a_wrong_request_leaves_no_garbage() -> None:
    """The parsed JSON of a large request would stay until garbage collection, which halts all answers meanwhile."""

    async def scenario(server: Server) -> None:
        raw = b'{"prompt": [' + b"1," * (1 << 16) + b'1], "messages": 5}'
        gc.collect()
        gc.disable()
        try:
            assert (await server.ask("/v1/completions", raw=raw)).status == 400
            for _ in range(500):  # the server's task may end after the client has its answer; a cycle would stay
                if not any(type(one) is ApiError for one in gc.get_objects()):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("what a wrong request left can only be found by a search for garbage")
        finally:
            gc.enable()

    run(scenario, engine={"longest": 1000})
