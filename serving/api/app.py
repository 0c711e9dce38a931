"""The server's routes, and what holds for all of them: keys, sizes, request ids, errors of one shape."""

import secrets
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from umbra.base.errors import UserError, one_line, refusal
from umbra.base.files import VERSION
from umbra.serving.api import anthropic, ollama, openai_chat, openai_completions, openapi, responses, tokenizing
from umbra.serving.api.auth import check_origin, is_allowed
from umbra.serving.api.batches import Batches
from umbra.serving.api.body import decoded, read_body
from umbra.serving.api.errors import ApiError, invalid
from umbra.serving.api.fields import KNOWN, KnownFields, meant_by, unknown
from umbra.serving.api.files import LARGEST_FILE, uploaded
from umbra.serving.api.front import Front
from umbra.serving.api.live import live_page
from umbra.serving.api.metrics import CONTENT_TYPE
from umbra.serving.api.request_log import CURRENT, HttpRecord
from umbra.serving.api.sse import ClientGone, EventStream, Json, failure, while_connected

MOST_UNREAD = 256  # names that are logged
SMALL = 1 << 16  # bytes of a body that is read in the event loop
OPEN_PATHS = frozenset({"/", "/health", "/health/ready", "/ping"})  # without a key
CLOSED = 499  # nginx's status for a client that has gone; nobody sees it

Result = TypeVar("Result")
Endpoint = Callable[[Front, Request], Awaitable[Response]]
NO_VECTORS = (
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    f"{ollama.PATH}/embed",
    f"{ollama.PATH}/embeddings",
)
WHILE_DRAINING = frozenset({"GET", "HEAD"})
PREFLIGHT = {  # what a page of an allowed origin may send
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "authorization, content-type, x-api-key, x-request-id, anthropic-version, "
    "anthropic-beta, x-stainless-arch, x-stainless-lang, x-stainless-os, x-stainless-package-version, "
    "x-stainless-retry-count, x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout",
    "access-control-max-age": "600",
}


async def health(front: Front, request: Request) -> Response:
    """Answers that the API server is alive."""
    return Json({"status": "alive"})


async def ready(front: Front, request: Request) -> Response:
    """Answers 200 if requests are taken, by a fresh answer of the ranks, and else 503."""
    serving = front.state == "serving"
    return Json(front.status, 200 if serving else 503, {} if serving else {"Retry-After": "1"})


async def version(front: Front, request: Request) -> Response:
    return Json({"version": VERSION})


def model_card(front: Front, name: str) -> dict[str, Any]:
    ready = front.client.ready
    card = {"id": name, "object": "model", "created": front.created, "owned_by": "umbra"}
    return {**card, "max_model_len": ready.longest if ready else front.case.max_sequence_length}


async def models(front: Front, request: Request) -> Response:
    return Json({"object": "list", "data": [model_card(front, name) for name in front.names]})


async def model(front: Front, request: Request) -> Response:
    name = request.path_params["name"]
    front.check_model(name)
    return Json(model_card(front, name if name in front.names else front.name))


async def completions(front: Front, request: Request) -> Response:
    completion = await prepared(front, request, openai_completions, openai_completions.CompletionRequest, KNOWN)
    return await answered(request, openai_completions, completion, completion.request.stream)


async def chat_completions(front: Front, request: Request) -> Response:
    chat = await prepared(front, request, openai_chat, openai_chat.ChatRequest, KNOWN)
    return await answered(request, openai_chat, chat, chat.request.stream)


async def create_response(front: Front, request: Request) -> Response:
    answer = await prepared(front, request, responses, responses.ResponsesRequest, responses.KNOWN)
    return await answered(request, responses, answer, answer.stream, answer.failure)


async def create_message(front: Front, request: Request) -> Response:
    answer = await prepared(front, request, anthropic, anthropic.MessagesRequest, anthropic.KNOWN)
    return await answered(request, anthropic, answer, answer.stream, anthropic.failure)


async def count_message_tokens(front: Front, request: Request) -> Response:
    return Json(await read(front, request, partial(anthropic.count_tokens, front)))


async def ollama_chat(front: Front, request: Request) -> Response:
    return await ollama_answer(front, request, ollama.prepare_chat, ollama.OllamaChat)


async def ollama_generate(front: Front, request: Request) -> Response:
    return await ollama_answer(front, request, ollama.prepare_generate, ollama.OllamaGenerate)


async def ollama_answer(
    front: Front,
    request: Request,
    prepare: Callable[[Front, Any, bytes], Coroutine[Any, Any, ollama.OllamaAnswer]],
    kind: type[msgspec.Struct],
) -> Response:
    """The answer to the request that `prepare` reads as a `kind`."""

    async def use(data: Any) -> ollama.OllamaAnswer:
        count_unknown(front, kind, data, ollama.KNOWN)
        return await prepare(front, data, request.state.salt)

    answer = await read(front, request, use)
    if answer.stream:
        return await ollama.JsonLines.start(request, ollama.events(answer), ollama.failure)
    return Json(await while_connected(request, ollama.whole(answer)))


async def ollama_tags(front: Front, request: Request) -> Response:
    return Json(ollama.tags(front))


async def ollama_show(front: Front, request: Request) -> Response:
    return Json(await read(front, request, partial(ollama.show, front)))


async def ollama_ps(front: Front, request: Request) -> Response:
    return Json(ollama.running(front))


async def no_vectors(front: Front, request: Request) -> Response:
    """Answers what no model of this server can do."""
    raise ApiError(
        400, f"{front.name} generates text: it has neither embeddings nor scores", "model", "unsupported_model"
    )


async def upload_file(front: Front, request: Request) -> Response:
    body = await read_body(request, LARGEST_FILE)
    kind, owner = request.headers.get("content-type", ""), request.state.salt
    file = await front.work(lambda: uploaded(kind, body, owner))
    return Json(front.files.add(file).body())


async def list_files(front: Front, request: Request) -> Response:
    own = [file.body() for file in front.files.of(request.state.salt)]
    return Json({"object": "list", "data": own, "has_more": False})


async def one_file(front: Front, request: Request) -> Response:
    id, owner = request.path_params["id"], request.state.salt
    return Json(front.files.delete(id, owner) if request.method == "DELETE" else front.files.get(id, owner).body())


async def file_content(front: Front, request: Request) -> Response:
    file = front.files.get(request.path_params["id"], request.state.salt)
    return Response(file.data, media_type="application/jsonl")


async def create_batch(front: Front, request: Request) -> Response:
    async def use(data: Any) -> Any:
        return batches_of(request).create(data, request.state.salt)

    return Json(await read(front, request, use))


async def list_batches(front: Front, request: Request) -> Response:
    own = [batch.body() for batch in batches_of(request).of(request.state.salt)]
    return Json({"object": "list", "data": own, "has_more": False})


async def one_batch(front: Front, request: Request) -> Response:
    return Json(batches_of(request).get(request.path_params["id"], request.state.salt).body())


async def cancel_batch(front: Front, request: Request) -> Response:
    return Json(batches_of(request).cancel(request.path_params["id"], request.state.salt))


def batches_of(request: Request) -> Batches:
    batches: Batches = request.app.batches
    return batches


async def tokenize(front: Front, request: Request) -> Response:
    return Json(await read(front, request, partial(tokenizing.tokenize, front)))


async def detokenize(front: Front, request: Request) -> Response:
    return Json(await read(front, request, partial(tokenizing.detokenize, front)))


async def metrics(front: Front, request: Request) -> Response:
    return Response(front.metrics.text(front.limits.refused), headers={"Content-Type": CONTENT_TYPE})


async def page(front: Front, request: Request) -> Response:
    return live_page()


async def live(front: Front, request: Request) -> Response:
    return await EventStream.start(request, front.live.events())


async def openapi_json(front: Front, request: Request) -> Response:
    return Json(openapi.document([(method, path) for method, path, _ in ROUTES]))


ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/health", health),
    ("GET", "/health/ready", ready),
    ("GET", "/ping", health),
    ("GET", "/version", version),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("GET", "/openapi.json", openapi_json),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/responses", create_response),
    ("POST", anthropic.PATH, create_message),
    ("POST", f"{anthropic.PATH}/count_tokens", count_message_tokens),
    ("POST", f"{ollama.PATH}/chat", ollama_chat),
    ("POST", f"{ollama.PATH}/generate", ollama_generate),
    ("GET", f"{ollama.PATH}/tags", ollama_tags),
    ("GET", f"{ollama.PATH}/version", version),
    ("POST", f"{ollama.PATH}/show", ollama_show),
    ("GET", f"{ollama.PATH}/ps", ollama_ps),
    ("POST", "/v1/files", upload_file),
    ("GET", "/v1/files", list_files),
    ("GET", "/v1/files/{id}", one_file),
    ("DELETE", "/v1/files/{id}", one_file),
    ("GET", "/v1/files/{id}/content", file_content),
    ("POST", "/v1/batches", create_batch),
    ("GET", "/v1/batches", list_batches),
    ("GET", "/v1/batches/{id}", one_batch),
    ("POST", "/v1/batches/{id}/cancel", cancel_batch),
    *[("POST", path, no_vectors) for path in NO_VECTORS],
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
]
PAGES: list[tuple[str, str, Endpoint]] = [  # no part of the API
    ("GET", "/", page),
    ("GET", "/live", live),
    ("GET", "/metrics", metrics),
]


class App:
    """The ASGI application of `front`."""

    def __init__(self, front: Front):
        self.front, self.batches = front, Batches(front)
        routes = [Route(path, self._endpoint(call), methods=[method]) for method, path, call in ROUTES + PAGES]
        self.router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # so that the router raises for what it does not have
        headers = Headers(scope=scope)
        id, begun = request_id(headers), False
        shared = self._shared_with(headers)
        record = HttpRecord(f"{scope['method']} {scope['path']}")
        CURRENT.set(record)

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, record.status = True, message["status"]
                if warning := record.warning():
                    shared["warning"] = warning
                answer = MutableHeaders(scope=message)
                answer.update(shared | {"x-request-id": id})
                if self.front.draining:
                    answer["connection"] = "close"
            await send(message)

        counted = scope["method"] not in WHILE_DRAINING
        self.front.open += counted
        try:
            await self._answer(scope, headers, receive, send_with_id)
        except Exception as failure:
            refused = refusal(failure)
            if refused:
                print(f"request {id}: {refused}", file=sys.stderr)
            else:
                traceback.print_exc()
            if begun:
                raise
            said = f"the server failed; its log has the reason under {id}"
            error = ApiError(503, refused, retry_s=1) if refused else ApiError(500, said, None, "internal_error")
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        finally:
            self.front.open -= counted
            if counted and self.front.case.serve_config.request_log:
                print(f"{id}: {record.line(self.front.name)}", flush=True)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy in front may honour the other header and read part of the body as a request.
            error = ApiError(400, "a body has either a Content-Length or a Transfer-Encoding")
            await error_response(error, scope["path"], {"Connection": "close"})(scope, receive, send)
            return
        try:
            serve = self.front.case.serve_config
            check_origin(headers, serve.host, self.front.keys, serve.cors_origins)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response(headers=PREFLIGHT)(scope, receive, send)
                return
            if scope["path"] not in OPEN_PATHS:
                scope.setdefault("state", {})["salt"] = self.front.keys.check(headers)
            if scope["method"] not in WHILE_DRAINING and self.front.draining:
                self.front.check_serving()
            await self.router(scope, receive, send)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        except HTTPException as error:
            text = {
                404: f"there is nothing at {scope['path'][:80]}",
                405: f"{scope['method'][:20]} is not for this path",
            }
            shown = ApiError(error.status_code, text.get(error.status_code, error.detail))
            await error_response(shown, scope["path"], dict(error.headers or {}))(scope, receive, send)
        except UserError as error:  # of the checkpoint's files, such as a tokenizer that fails
            shown = ApiError(500, str(error), None, "internal_error")
            await error_response(shown, scope["path"])(scope, receive, send)
        except ClientGone:
            await Response(status_code=CLOSED)(scope, receive, send)

    def _shared_with(self, headers: Headers) -> dict[str, str]:
        """The headers by which a browser gives an answer to the page of another origin that has asked."""
        origin, origins = headers.get("origin"), self.front.case.serve_config.cors_origins
        if not is_allowed(origin, origins):
            return {}
        return {
            "access-control-allow-origin": "*" if "*" in origins else str(origin),
            "access-control-expose-headers": "x-request-id, retry-after",
            "vary": "Origin",
        }

    def _endpoint(self, call: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        return partial(call, self.front)


def error_response(error: ApiError, path: str, headers: dict[str, str] | None = None) -> Response:
    """`error` in the shape of the API that `path` belongs to."""
    if record := CURRENT.get():
        record.refused = str(error)
    if error.status in (401, 403, 408, 413):  # the rest of the body is not read
        headers = {**(headers or {}), "Connection": "close"}
    if path.startswith(f"{ollama.PATH}/"):
        body = ollama.envelope(error)
    else:
        body = anthropic.envelope(error) if f"{path}/".startswith(f"{anthropic.PATH}/") else error.envelope()
    return Json(body, error.status, {**(headers or {}), **error.headers})


def request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return (
        given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else f"req_{secrets.token_hex(12)}"
    )


async def read(front: Front, request: Request, use: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
    """Parses the request's body as JSON, passes it to `use`, and returns its result. Large bodies take turns, because
    parsed JSON is many times as large and blocks the event loop through garbage collection while it exists."""
    body = await read_body(request)

    async def used() -> Result:
        if len(body) < SMALL:
            return await use(decoded(body))
        async with front.turn():
            return await use(await front.work(partial(decoded, body)))

    return await while_connected(request, used())


async def prepared(
    front: Front, request: Request, api: ModuleType, kind: type[msgspec.Struct], known: KnownFields
) -> Any:
    """Returns the job that `api` prepares from the request's body, and counts the fields that nothing reads."""

    async def use(data: Any) -> Any:
        count_unknown(front, kind, data, known)
        return await api.prepare(front, data, request.state.salt)

    return await read(front, request, use)


async def answered(
    request: Request,
    api: ModuleType,
    prepared: Any,
    stream: bool | None,
    failure: Callable[[ApiError], bytes] = failure,
) -> Response:
    """The answer to a request that `api` has `prepared`."""
    if stream:
        return await EventStream.start(request, api.events(prepared), failure)
    return Json(await while_connected(request, api.whole(prepared)))


def count_unknown(front: Front, kind: type[msgspec.Struct], data: Any, known: KnownFields) -> None:
    """Counts the fields of `data` that nothing reads: they are neither of `kind` nor `known`. The first one of each
    name is logged. Raises ApiError for a known field's name that is written wrong."""
    if isinstance(data, dict):
        for name in unknown(kind, data, known):
            if right := meant_by(name, kind):
                raise invalid(name[:64], f"there is no such field: write {right}", "unknown_parameter")
            front.metrics.unread.inc()
            if name[:64] not in front.unread and len(front.unread) < MOST_UNREAD:
                front.unread.add(name[:64])
                print(one_line(f"a request has the field {name[:64]!r}, which nothing reads"), flush=True)
