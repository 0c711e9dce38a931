"""GET /openapi.json: what the server takes, made from the types that read it."""

import re
from typing import Any

import msgspec

from umbra.serving.api import anthropic, ollama
from umbra.serving.api.anthropic import CountRequest, MessagesRequest
from umbra.serving.api.batches import BatchRequest
from umbra.serving.api.openai_chat import ChatRequest
from umbra.serving.api.openai_completions import CompletionRequest
from umbra.serving.api.responses import ResponsesRequest
from umbra.serving.api.tokenizing import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    anthropic.PATH: MessagesRequest,
    f"{anthropic.PATH}/count_tokens": CountRequest,
    f"{ollama.PATH}/chat": ollama.OllamaChat,
    f"{ollama.PATH}/generate": ollama.OllamaGenerate,
    f"{ollama.PATH}/show": ollama.ShowRequest,
    "/v1/batches": BatchRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
REFUSALS = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": TEXT_OR_NULL,
                "code": TEXT_OR_NULL,
            },
        }
    },
}
MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
ASKED = [{"role": "user", "content": "Hi"}]
MESSAGES_TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}}}
TOOL = {"type": "function", "name": "weather", "parameters": MESSAGES_TOOL["input_schema"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": MESSAGES_TOOL["input_schema"]}}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": ASKED, "max_tokens": 8},
        {"messages": ASKED, "max_tokens": 8, "tools": [CHAT_TOOL], "tool_choice": "required", "stream": True},
    ],
    "/v1/completions": [{"prompt": "Hi", "max_tokens": 8}, {"prompt": [1, 2], "max_tokens": 8, "stream": True}],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 8},
        {"input": ASKED, "max_output_tokens": 8, "tools": [TOOL], "tool_choice": "required", "stream": True},
    ],
    anthropic.PATH: [
        {"messages": ASKED, "max_tokens": 8},
        {"messages": ASKED, "max_tokens": 8, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}, "stream": True},
    ],
    f"{anthropic.PATH}/count_tokens": [{"messages": ASKED, "system": "Be brief."}],
    f"{ollama.PATH}/chat": [{"messages": ASKED, "options": {"num_predict": 8}}, {"messages": ASKED, "stream": False}],
    f"{ollama.PATH}/generate": [{"prompt": "Hi", "options": {"num_predict": 8}}, {"prompt": "Hi", "raw": True}],
    f"{ollama.PATH}/show": [{"model": ""}],
    "/v1/batches": [{"input_file_id": "file-1", "endpoint": "/v1/completions"}],
    "/tokenize": [{"prompt": "Hi"}, {"messages": ASKED}],
    "/detokenize": [{"tokens": [1, 2]}],
}


def document(routes: list[tuple[str, str]]) -> dict[str, Any]:
    """The OpenAPI document of `routes`, each a method and a path."""
    _, components = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for method, path in routes:
        shown = path.replace(":path", "")
        paths.setdefault(shown, {})[method.lower()] = _operation(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Umbra", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR, "MessagesError": MESSAGES_ERROR, "OllamaError": OLLAMA_ERROR}
        },
    }


def _operation(path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    shape = "MessagesError" if path.startswith(anthropic.PATH) else "Error"
    shape = "OllamaError" if path.startswith(ollama.PATH) else shape
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    if "stream" in getattr(BODIES.get(path), "__struct_fields__", ()):
        answer["application/x-ndjson" if path.startswith(ollama.PATH) else "text/event-stream"] = {}
    if path == "/health/ready":
        refusal = answer
    responses = {"200": {"description": "the answer", "content": answer}}
    responses |= {str(status): {"description": "an error", "content": refusal} for status in REFUSALS}
    operation: dict[str, Any] = {"responses": responses}
    if path in BODIES:
        examples = {str(i): {"value": example} for i, example in enumerate(EXAMPLES[path])}
        body = {"schema": {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}, "examples": examples}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    for name in re.findall(r"{(\w+)", path):
        operation.setdefault("parameters", []).append(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        )
    return operation
