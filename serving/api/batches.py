"""Batches: files with a request in each line, which are answered while others have precedence; POST /v1/batches and
`umbra run-batch`. A server keeps its batches and files in memory, until it ends."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from umbra.base.errors import UserError
from umbra.serving.api import openai_chat, openai_completions, responses
from umbra.serving.api.errors import ApiError, invalid
from umbra.serving.api.fields import LARGEST_PRIORITY, typed
from umbra.serving.api.files import StoredFile
from umbra.serving.api.front import Front
from umbra.serving.api.request_log import CURRENT, HttpRecord

MOST_LINES, MOST_BATCHES = 50_000, 256
MOST_SHOWN = 20  # lines that are wrong
AGAIN_S = 1.0  # seconds until a request that the server was too busy for is tried again
WINDOW_S = 24 * 3600
APIS = {"/v1/chat/completions": openai_chat, "/v1/completions": openai_completions, "/v1/responses": responses}


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


@dataclass
class RequestBatch:
    """One batch and how far it is. `times` has the moments at which it came into each status."""

    request: BatchRequest
    owner: bytes
    id: str = field(default_factory=lambda: f"batch_{secrets.token_hex(12)}")
    status: str = ""
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    answered: list[bytes] = field(default_factory=list)  # lines of the output file
    failed: list[bytes] = field(default_factory=list)  # and of the file of errors
    files: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None

    def enter(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def body(self) -> dict[str, Any]:
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        created = self.times["validating"]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.request.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.request.input_file_id,
            "completion_window": self.request.completion_window,
            "status": self.status,
            "output_file_id": self.files.get("output"),
            "error_file_id": self.files.get("error"),
            "created_at": created,
            "expires_at": created + WINDOW_S,
            **{f"{moment}_at": self.times.get(moment) for moment in moments},
            "request_counts": {"total": self.total, "completed": len(self.answered), "failed": len(self.failed)},
            "metadata": self.request.metadata,
        }


def parsed(data: bytes, endpoint: str = "") -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """The requests in `data`, of which all are for `endpoint` if one is given; and what is wrong with its lines."""
    lines: list[BatchLine] = []
    errors: list[dict[str, Any]] = []
    ids: set[str] = set()
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=BatchLine)
            if line.url not in APIS or (endpoint and line.url != endpoint):
                raise ValueError(f"url: {line.url:.60} is not {endpoint or ' or '.join(APIS)}")
            if line.custom_id in ids or line.method != "POST":
                raise ValueError(f"{line.custom_id:.60}: custom_id must be unlike all others, and method POST")
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            errors.append({"code": "invalid_line", "line": number, "message": str(error)[:300], "param": None})
            continue
        ids.add(line.custom_id)
        lines.append(line)
    if not errors and not 1 <= len(lines) <= MOST_LINES:
        said = f"{len(lines)} requests are not 1 to {MOST_LINES}"
        errors.append({"code": "invalid_length", "line": None, "message": said, "param": None})
    return lines, errors[:MOST_SHOWN]


async def answer_all(
    front: Front, lines: Sequence[BatchLine], salt: bytes, take: Callable[[bool, bytes], None]
) -> None:
    """Answers `lines`, as many at a time as the engine runs. `take` gets each answer's line as it comes, and whether
    it was an answer and no error."""
    left = iter(lines)

    async def worker() -> None:
        for line in left:
            status, body, id = await answer(front, line, salt)
            told = {"status_code": status, "request_id": id, "body": body}
            said = {"id": f"batch_{id}", "custom_id": line.custom_id, "response": told, "error": None}
            take(status == 200, msgspec.json.encode(said) + b"\n")

    ready, _ = front.check_serving()
    workers = [asyncio.create_task(worker()) for _ in range(min(len(lines), ready.batch_size))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def answer(front: Front, line: BatchLine, salt: bytes) -> tuple[int, Any, str]:
    """Answers one line. -> status, body, and the request's id. A server that is too busy is asked again."""
    id, api = f"req_{secrets.token_hex(12)}", APIS[line.url]
    body = {"priority": LARGEST_PRIORITY} | line.body if line.url != "/v1/responses" else line.body
    while True:
        record = HttpRecord(f"batch {line.url}")
        CURRENT.set(record)
        error = None
        try:
            if body.get("stream"):
                raise invalid("stream", "a batch has whole answers")
            told = await api.whole(await api.prepare(front, body, salt))
        except ApiError as refused:
            error = refused
        except UserError as failed:
            error = ApiError(500, str(failed), None, "internal_error")
        if error and error.status in (429, 503) and not front.draining:
            await asyncio.sleep(max(AGAIN_S, error.retry_s))
            continue
        record.status, record.refused = (error.status, str(error)) if error else (200, "")
        if front.case.serve_config.request_log:
            print(f"{id}: {record.line(front.name)}", flush=True)
        return (error.status, error.envelope(), id) if error else (200, told, id)


class Batches:
    """The batches of a server."""

    def __init__(self, front: Front):
        self.front = front
        self._batches: dict[str, RequestBatch] = {}

    def create(self, data: Any, owner: bytes) -> dict[str, Any]:
        """Begins the batch that `data` asks for. Raises ApiError if it is wrong."""
        self.front.check_serving()
        request = typed(BatchRequest, data)
        if request.endpoint not in APIS:
            raise invalid("endpoint", f"{request.endpoint:.60} is none of {', '.join(APIS)}")
        if len(self._batches) >= MOST_BATCHES:
            ended = next((id for id, batch in self._batches.items() if batch.task and batch.task.done()), None)
            if ended is None:
                raise ApiError(429, f"{MOST_BATCHES} batches are open", None, "queue_full", 60)
            del self._batches[ended]
        file = self.front.files.get(request.input_file_id, owner, "input_file_id")
        batch = RequestBatch(request, owner)
        batch.enter("validating")
        self._batches[batch.id] = batch
        batch.task = asyncio.create_task(self._run(batch, file))
        return batch.body()

    def get(self, id: str, owner: bytes) -> RequestBatch:
        """Raises ApiError if this owner has no such batch."""
        batch = self._batches.get(id)
        if not batch or batch.owner != owner:
            raise ApiError(404, f"there is no batch {id:.60}", "batch_id", "not_found")
        return batch

    def of(self, owner: bytes) -> list[RequestBatch]:
        """The owner's batches, the last one first."""
        return [batch for batch in reversed(self._batches.values()) if batch.owner == owner]

    def cancel(self, id: str, owner: bytes) -> dict[str, Any]:
        batch = self.get(id, owner)
        if batch.task and not batch.task.done():
            batch.enter("cancelling")
            batch.task.cancel()
        return batch.body()

    async def _run(self, batch: RequestBatch, file: StoredFile) -> None:
        lines, batch.errors = await self.front.work(lambda: parsed(file.data, batch.request.endpoint))
        if batch.errors:
            batch.enter("failed")
            return
        batch.total = len(lines)
        batch.enter("in_progress")
        try:
            await answer_all(self.front, lines, batch.owner, self._taker(batch))
            batch.enter("finalizing")
            self._keep(batch)
            batch.enter("failed" if batch.errors else "completed")
        except asyncio.CancelledError:
            self._keep(batch)
            batch.enter("cancelled")

    def _taker(self, batch: RequestBatch) -> Callable[[bool, bytes], None]:
        return lambda good, line: (batch.answered if good else batch.failed).append(line)

    def _keep(self, batch: RequestBatch) -> None:
        for name, lines in (("output", batch.answered), ("error", batch.failed)):
            file = StoredFile(b"".join(lines), f"{batch.id}_{name}.jsonl", f"batch_{name}", batch.owner)
            try:
                batch.files |= {name: self.front.files.add(file).id} if lines else {}
            except ApiError as error:
                batch.errors.append({"code": error.code, "line": None, "message": str(error), "param": None})
