"""Clients as they come: what each sends by default and how it goes on. Codex, Claude Code, LangChain and LiteLLM were
recorded in 2026; the others' shapes are those of the code that makes their requests: `routers/openai.py` of Open WebUI,
`providers/openai.ts` of Cline, `openaiTypeConverters.ts` of Continue, `sendchat.py` of aider."""

import json
from typing import Any

from tests.serving.api.front import Reply
from tests.serving.api.test_anthropic import told

TOWN = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
LOOSE = {"type": "object", "properties": {"n": {"type": "integer", "exclusiveMinimum": 0}}, "not": {"required": ["x"]}}
SPAWN = {"type": "function", "name": "spawn_agent", "description": "Spawn.", "strict": False, "parameters": TOWN}
PATCH = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


class Agent:
    """One conversation. `take` reads an answer that was streamed, and returns whether it has called a tool."""

    path = "/v1/chat/completions"
    limit = "max_completion_tokens"

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def body(self, **more: Any) -> dict[str, Any]:
        raise NotImplementedError

    def take(self, reply: Reply) -> bool:
        raise NotImplementedError

    def result(self, text: str, image: bool = False) -> None:
        """Adds the results of the last calls."""
        raise NotImplementedError

    def user(self, text: str) -> None:
        self.said.append({"role": "user", "content": text})

    def system(self, text: str) -> None:
        self.said.append({"role": "system", "content": text})


class Codex(Agent):
    path = "/v1/responses"
    limit = "max_output_tokens"

    def __init__(self) -> None:
        super().__init__()
        self._message("developer", "You are a coding agent.")
        self._message("developer", "Skills.", "Permissions.")
        self._message("user", "<environment_context>")
        self.calls: list[dict[str, Any]] = []

    def _message(self, role: str, *texts: str) -> None:
        parts = [{"type": "input_text", "text": text} for text in texts]
        self.said.append({"type": "message", "id": f"msg_{len(self.said)}", "role": role, "content": parts})

    def user(self, text: str) -> None:
        self._message("user", text)

    def system(self, text: str) -> None:
        self._message("developer", text)

    def body(self, **more: Any) -> dict[str, Any]:
        function = {"type": "function", "strict": False}
        return {
            "model": "demo_chat",
            "stream": True,
            "input": self.said,
            "tools": [
                {**function, "name": "weather", "description": "It rains?", "parameters": TOWN},
                {**function, "name": "view_image", "parameters": LOOSE},
                {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [SPAWN]},
                {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": PATCH},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "text": {"verbosity": "low"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "client_metadata": {"thread_id": "01a2", "x-codex-window-id": "01a2:0"},
        } | more

    def take(self, reply: Reply) -> bool:
        items = [event["item"] for event in told(reply) if event["type"] == "response.output_item.done"]
        self.calls = [item for item in items if item["type"] in ("function_call", "custom_tool_call")]
        for item in items:
            kept = {key: value for key, value in item.items() if key != "id"}
            self.said.append(kept | ({"encrypted_content": None} if item["type"] == "reasoning" else {}))
        return bool(self.calls)

    def result(self, text: str, image: bool = False) -> None:
        output: Any = [{"type": "input_image", "image_url": IMAGE}] if image else text
        for call in self.calls:
            kind = f"{call['type']}_output"
            self.said.append({"type": kind, "id": "fco_1", "call_id": call["call_id"], "output": output})


class ClaudeCode(Agent):
    path = "/v1/messages?beta=true"
    limit = "max_tokens"

    def __init__(self) -> None:
        super().__init__()
        self.user("<system-reminder>")
        self.system("Available agent types.")
        self.calls: list[dict[str, Any]] = []

    def body(self, **more: Any) -> dict[str, Any]:
        cached = {"cache_control": {"type": "ephemeral"}}
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}
        return {
            "model": "claude-haiku-4-5-20251001",
            "messages": self.said,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={len(self.said)};"},
                {"type": "text", "text": "You are an agent.", **cached},
                {"type": "text", "text": "You are interactive.", **cached},
            ],
            "tools": [
                {"name": "weather", "description": "It rains?", "input_schema": schema | TOWN},
                {"name": "Read", "description": "Reads.", "input_schema": schema | LOOSE},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            "metadata": {"user_id": "{}"},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "inference_geo": "us",
            "output_config": {"effort": "high"},
            "stream": True,
        } | more

    def take(self, reply: Reply) -> bool:
        blocks: list[dict[str, Any]] = []
        for event in told(reply):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                for name, to in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    blocks[-1][to] = blocks[-1].get(to, "") + delta.get(name, "")
        for block in blocks:
            given = block.pop("json")
            if block["type"] == "tool_use":
                block.pop("text", None)
                block.pop("thinking", None)
                block["input"] = read(given)
        self.calls = [block for block in blocks if block["type"] == "tool_use"]
        self.said.append({"role": "assistant", "content": blocks})
        return bool(self.calls)

    def result(self, text: str, image: bool = False) -> None:
        shown: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": shown if image else text, "is_error": False}
            for call in self.calls
        ]
        self.said.append({"role": "user", "content": results})


class OpenAIPython(Agent):
    def __init__(self) -> None:
        super().__init__()
        self.system("You are an agent.")
        self.calls: list[dict[str, Any]] = []

    def body(self, **more: Any) -> dict[str, Any]:
        named = [("weather", TOWN), ("view", LOOSE)]
        return {
            "model": "demo_chat",
            "messages": self.said,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in named],
            "reasoning_effort": "low",
        } | more

    def take(self, reply: Reply) -> bool:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.calls = []
        for event in reply.events[:-1]:
            for choice in event["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                if thought := delta.get("reasoning_content"):
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
                for call in delta.get("tool_calls", []):
                    if call["index"] == len(self.calls):
                        self.calls.append(json.loads(json.dumps(call)))
                    else:
                        self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        self.said.append(message | ({"tool_calls": self.calls} if self.calls else {}))
        return bool(self.calls)

    def result(self, text: str, image: bool = False) -> None:
        content: Any = [{"type": "image_url", "image_url": {"url": IMAGE}}] if image else text
        for call in self.calls:
            self.said.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def read(text: str) -> Any:
    """The arguments as a client reads them that makes the best of those which were cut off."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


ASKED = [{"role": "user", "content": "Hi"}]
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "It rains?", "parameters": TOWN}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# First requests of other clients: their path, and their body besides the model.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI": ("/v1/chat/completions", {"messages": ASKED, **STREAMED}),
    "Open WebUI, a title": ("/v1/chat/completions", {"messages": ASKED, "stream": False, "max_completion_tokens": 9}),
    "Cline": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "S"}, *PARTS], "temperature": 0, **STREAMED},
    ),
    "Continue": ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 2048, "stream": True, "tools": [FUNCTION]}),
    "Continue, completing": (
        "/v1/completions",
        {
            "prompt": "<|fim_prefix|>a<|fim_suffix|>b",
            "max_tokens": 9,
            "temperature": 0.01,
            "stop": ["x"],
            "stream": True,
        },
    ),
    "aider": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "S"},
                *ASKED,
                {"role": "assistant", "content": "Ok."},
                *ASKED,
                {"role": "system", "content": "Remember."},
            ],
            "temperature": 0,
            "stream": True,
        },
    ),
    "LangChain": ("/v1/chat/completions", {"messages": ASKED, "stream": False, "tools": [FUNCTION]}),
    "LangChain, responses": (
        "/v1/responses",
        {
            "input": [{"content": "Hi", "role": "user", "type": "message"}],
            "stream": False,
            "tools": [{"type": "function", **FUNCTION["function"]}],  # type: ignore[dict-item]
        },
    ),
    "LiteLLM": ("/v1/chat/completions", {"messages": ASKED, "reasoning_effort": "low", "tools": [FUNCTION]}),
}
