"""Ollama's API: its lines, options, formats, tools and errors."""

import json
from typing import Any

from tests.serving.api.front import Reply, Server, run
from tests.serving.api.test_chat import TOOL

ASKED: dict[str, Any] = {"model": "demo_chat:latest", "messages": [{"role": "user", "content": "Hi"}]}
CALL = 'Hm</think>\n\nAh.<tool_call>\n{"name": "weather", "arguments": {"town": "Bath"}}\n</tool_call>'


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in reply.body.splitlines()]


def test_chats_and_texts() -> None:
    async def scenario(server: Server) -> None:
        parts = lines(await server.ask("/api/chat", ASKED))
        assert "".join(part["message"]["content"] for part in parts) == "Hello!"
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
        end = parts[-1]
        assert (end["done_reason"], end["eval_count"], end["model"]) == ("stop", 7, "demo_chat")
        whole = (await server.ask("/api/chat", ASKED | {"stream": False})).json
        assert (whole["message"], whole["done"]) == ({"role": "assistant", "content": "Hello!"}, True)
        chat = server.engine.submitted[-1].ids
        parts = lines(await server.ask("/api/generate", {"prompt": "Hi"}))
        assert "".join(part["response"] for part in parts) == "Hello!"
        assert server.engine.submitted[-1].ids == chat
        raw = (await server.ask("/api/generate", {"prompt": "Hi", "raw": True, "stream": False})).json
        assert (raw["response"], raw["prompt_eval_count"]) == ("Hello!", 2)
        asked = len(server.engine.submitted)
        for path in ("chat", "generate"):
            assert lines(await server.ask(f"/api/{path}", {"model": "demo_chat"}))[-1]["done_reason"] == "load"
        assert len(server.engine.submitted) == asked

    run(scenario)


def test_options_and_formats_are_those_of_a_chat() -> None:
    async def scenario(server: Server) -> None:
        options = {"temperature": 0.5, "num_predict": 3, "seed": 7, "repeat_penalty": 1.5, "num_ctx": 4096}
        reply = await server.ask("/api/chat", ASKED | {"options": options, "format": {"type": "object"}})
        assert lines(reply)[-1]["done_reason"] == "length"
        assert "options.num_ctx" in reply.headers["warning"]
        sampling = server.engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 3, 7)
        assert (sampling.repetition_penalty, sampling.grammar is None) == (1.5, False)
        await server.ask("/api/chat", ASKED | {"options": {"num_predict": -1}, "think": False})
        assert server.tokenizer.decode(list(server.engine.submitted[-1].ids)).endswith("</think>\n\n")

    run(scenario)


def test_reasoning_and_calls_go_out_and_come_back() -> None:
    async def scenario(server: Server) -> None:
        said = (await server.ask("/api/chat", ASKED | {"tools": [TOOL], "stream": False})).json["message"]
        assert (said["thinking"], said["content"].strip()) == ("Hm", "Ah.")
        assert said["tool_calls"] == [{"function": {"name": "weather", "arguments": {"town": "Bath"}}}]
        result = {"role": "tool", "tool_name": "weather", "content": "It rains."}
        history = [*ASKED["messages"], said, result]
        assert (await server.ask("/api/chat", {"messages": history, "tools": [TOOL]})).status == 200
        prompt = server.tokenizer.decode(list(server.engine.submitted[-1].ids))
        assert '"town": "Bath"' in prompt
        assert "It rains." in prompt
        cut = ASKED | {"tools": [TOOL], "stream": False, "options": {"num_predict": len(CALL) - 30}}
        assert "tool_calls" not in (await server.ask("/api/chat", cut)).json["message"]

    run(scenario, "<think>\n" + CALL)


def test_models_and_errors() -> None:
    async def scenario(server: Server) -> None:
        names = [model["name"] for model in (await server.get("/api/tags")).json["models"]]
        assert names == ["a:latest", "b:latest"]
        assert (await server.get("/api/tags")).json["models"][0]["size"] > 1000
        assert (await server.get("/api/version")).json.keys() == {"version"}
        assert (await server.get("/api/ps")).json["models"][1]["name"] == "b:latest"
        shown = (await server.ask("/api/show", {"model": "b:latest"})).json
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["qwen3_moe.context_length"] == 2000
        assert (await server.ask("/api/show", {"name": "c"})).status == 404
        for asked, status, said in (
            ({"model": "other"}, 404, "there is no model other"),
            ({"options": {"num_predict": 0}}, 400, "options.num_predict: 0 must be"),
            ({"format": "yaml"}, 400, "format: must be json"),
            ({"images": ["x"]}, 400, "images: this field is not supported"),
            ({"option": {}}, 400, "option: there is no such field: write options"),
        ):
            reply = await server.ask("/api/chat", ASKED | {"model": "b"} | asked)
            assert (reply.status, reply.json.keys()) == (status, {"error"})
            assert reply.json["error"].startswith(said)

    run(scenario, served_model_name="a b")
