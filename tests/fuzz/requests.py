"""The bodies of requests, and the grammars in them."""

import json
import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from executor.engine.request import Grammar
from serving.api.anthropic import PATH
from serving.api.compiling import MEMORY, SECONDS, TOO_MUCH, Compiler, compiled, tokens_of
from serving.api.errors import ApiError
from serving.api.structured import check_schema
from tests.fuzz.front import Api
from tests.fuzz.target import Target, Violation
from tests.fuzz.texts import MESSAGES, TOOLS
from text.sandbox import limit_memory

USER = [{"role": "user", "content": "Hi"}]
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "seed": 7, "stop": ["x"], "stop_token_ids": [3], "n": 2,
    "priority": 1, "cache_salt": "s", "ignore_eos": False, "max_tokens": 4,
}  # fmt: skip
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
detokenization = _bodies("/detokenize", {"tokens": [1, 2, 3], "model": "demo_chat"})


class Compiling:
    """Compiles grammars as the compiler's process does, but one after the other in a fork that lives until it is ended:
    a fork for each would take most of the time."""

    def __init__(self, setup: bytes):
        self.tokens = tokens_of(setup)
        self.child: ForkProcess | None = None

    def problem(self, kind: str, text: str) -> str:
        if not self.child:
            self.mine, its = Pipe()
            self.child = ForkProcess(target=self._compile, args=(its,))
            self.child.start()
            its.close()
        self.mine.send((kind, text))
        try:
            return str(self.mine.recv())
        except EOFError:
            self.child.join()
            self.child = None
            return TOO_MUCH

    def _compile(self, its: Connection) -> None:
        os.close(2)  # what llguidance says of the end of its memory
        self.mine.close()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        limit_memory(MEMORY)
        while True:
            grammar = Grammar(*its.recv())
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            its.send(compiled(grammar, self.tokens))


def grammar(folder: Path) -> Target:
    """The first byte chooses the kind. Grammars without end are those that the fork gives up."""
    api = Api(folder)
    ready = api.front.client.ready
    assert api.front.text
    assert ready
    compiler = Compiling(Compiler(api.front.text.tokenizer, ready).sandbox.setup)

    def run(data: bytes) -> None:
        kind, text = ("json", "regex", "lark")[data[0] % 3 if data else 0], data[1:].decode(errors="replace")
        try:
            if kind == "json":
                check_schema("schema", json.loads(text))
        except (ValueError, RecursionError, ApiError):
            return
        problem = compiler.problem(kind, text)
        if "\n" in problem or len(problem) > max(300, len(TOO_MUCH)):
            raise Violation(f"a problem of {len(problem)} characters: {problem[:200]!r}")

    more = {
        "anyOf": [{"enum": [1, "x"]}, {"$ref": "#/$defs/d"}],
        "$defs": {"d": {"type": "string", "pattern": "a{2,5}"}},
    }
    array = {"type": "array", "items": more, "minItems": 1, "maxItems": 9, "uniqueItems": False}
    numbers = {"type": "number", "minimum": 1, "maximum": 5, "multipleOf": 0.5}
    schemas = [SCHEMA, array, numbers, {"allOf": [SCHEMA, {"additionalProperties": False}]}, {"const": {"a": [1]}}]
    seeds = [b"\0" + json.dumps(schema).encode() for schema in schemas]
    seeds += [b"\1" + pattern for pattern in (b"a+|b*", b"(?i)[a-z]{2,5}\\d", b"(?:x|y)+.\\p{L}")]
    seeds += [
        b'\2start: a+\na: "x" | /y+/\n',
        b'\2start: %json {"type": "object"}\n',
        b"\2start: x[max_tokens=5]\nx: /a/\n",
    ]
    return Target(run, seeds, json=False)
