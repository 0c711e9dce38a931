"""GET /openapi.json: what the server takes, made from the types that read it."""

from typing import Any

import msgspec

from executor.serving.openai_chat import ChatRequest
from executor.serving.openai_completions import CompletionRequest
from executor.serving.tokenizing import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
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
        "components": {"schemas": {**components, "Error": ERROR}},
    }


def _operation(path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    if path.startswith("/v1/") and path in BODIES:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/health/ready":
        refusal = answer
    responses = {"200": {"description": "the answer", "content": answer}}
    responses |= {str(status): {"description": "an error", "content": refusal} for status in REFUSALS}
    operation: dict[str, Any] = {"responses": responses}
    if path in BODIES:
        body = {"schema": {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if "{name:path}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
