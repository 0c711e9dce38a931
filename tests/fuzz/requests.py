"""The bodies of requests, and the bytes of connections."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.front import Api, request
from tests.fuzz.target import Target
from tests.fuzz.texts import MESSAGES, TOOLS
from umbra.serving.api.anthropic import PATH

USER = [{"role": "user", "content": "Hi"}]
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [3],
    "n": 2,
    "priority": 1,
    "cache_salt": "s",
    "ignore_eos": False,
    "max_tokens": 4,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def _bodies(path: str, *seeds: Any) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        api = Api(folder)
        return Target(lambda data: api.ask(path, data), [json.dumps(seed).encode() for seed in seeds])

    return make


chat = _bodies(
    "/v1/chat/completions",
    {"messages": USER} | SAMPLING,
    {"messages": [{**m, "content": m["content"] or None} for m in MESSAGES], "tools": TOOLS, "stream": True},
    {"messages": USER, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"messages": USER, "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"messages": USER, "response_format": FORMAT, "reasoning_effort": "none"},
    {"messages": USER, "structured_outputs": {"regex": "a+"}, "model": "demo_chat"},
)
completion = _bodies(
    "/v1/completions",
    {"prompt": "Hi", "echo": True, "logprobs": 2} | SAMPLING,
    {"prompt": ["a", [1, 2]], "max_tokens": 0, "stream": True, "guided_choice": ["a", "b"]},
    {"prompt": [1, 2, 3], "guided_json": SCHEMA, "add_special_tokens": False},
)
response = _bodies(
    "/v1/responses",
    {
        "input": "Hi",
        "instructions": "S",
        "max_output_tokens": 4,
        "stream": True,
        "include": ["message.output_text.logprobs"],
    },
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "content": []},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "tool_choice": "auto",
    },
    {
        "input": "Hi",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
    },
)
message = _bodies(
    PATH,
    {"messages": USER, "max_tokens": 4, "system": "S", "stop_sequences": ["x"], "top_k": 5, "stream": True},
    {
        "messages": [
            *USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
        ],
        "max_tokens": 4,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
    {"messages": USER, "max_tokens": 4, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
)
tokenization = _bodies(
    "/tokenize",
    {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True},
    {"messages": MESSAGES, "tools": TOOLS},
)


def http(folder: Path) -> Target:
    """Bytes of a connection. The first byte says into how many pieces the rest is cut."""
    api = Api(folder)

    def run(data: bytes) -> None:
        count, rest = data[0] % 8 + 1 if data else 1, data[1:]
        step = max(1, -(-len(rest) // count))
        api.send([rest[at : at + step] for at in range(0, len(rest), step)])

    chat = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": true}'
    chunked = b"5\r\n" + chat[:5] + b"\r\n%x\r\n" % (len(chat) - 5) + chat[5:] + b"\r\n0\r\n\r\n"
    seeds = [
        request(b"GET /health"),
        request(b"GET /v1/models/x%20y?a=b"),
        request(b"HEAD /metrics"),
        request(b"GET /"),
        request(b"GET /openapi.json"),
        request(b"OPTIONS *"),
        request(b"POST /v1/chat/completions", chat),
        request(b"POST /tokenize", b'{"prompt": "x"}') * 2,
        request(b"POST /v1/chat/completions", chunked, b"transfer-encoding: chunked", b"expect: 100-continue"),
        request(
            b"POST /v1/completions",
            b'{"prompt": "x"}',
            b"content-length: 15",
            b"x-request-id: 1",
            b"authorization: Bearer x",
        ),
        request(
            b"GET /v1/models",
            b"",
            b"origin: http://127.0.0.1",
            b"connection: keep-alive, upgrade",
            b"upgrade: websocket",
        ),
    ]
    return Target(run, [bytes([number % 8]) + seed for number, seed in enumerate(seeds)], json=False)
