"""A front without a port or ranks: requests go to its application, and each is answered with two tokens."""

import asyncio
import json
from collections.abc import AsyncGenerator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec

from executor.config.load import load_case
from serving.api.app import App
from serving.api.auth import Keys
from serving.api.front import Front, Text
from serving.ranks.channel import framed
from serving.ranks.client import EngineClient
from serving.ranks.messages import Message, Ready, Row, Sampling, Submit, ToEngine
from serving.ranks.worker import request_of
from tests.fakes.serving_engine import logprob
from tests.fuzz.target import Violation
from tests.text.checkpoints import write_tokenizer
from text.tokenizer import Tokenizer
from umbra.errors import LONGEST


class Engine(EngineClient):
    """Every request is sent and read as the one rank would, and answered at once."""

    def __init__(self, folder: Path, vocabulary: int, end: int):
        super().__init__(folder / "none")
        self.ready = Ready(2000, 4, vocabulary, 16, 64, 1, [end], 1e6)
        self.alive, self.end = True, end
        self._reads: Any = msgspec.msgpack.Decoder(ToEngine)

    async def rows(
        self, ids: list[int], sampling: Sampling, priority: int = 0, salt: bytes = b"", id: int | None = None
    ) -> AsyncGenerator[Row, None]:
        submit = self._reads.decode(framed(Submit(id or 0, ids, sampling, priority, salt))[4:])
        request_of(submit)
        wanted, prompt = sampling.logprobs, sampling.prompt_logprobs
        of_prompt = [] if prompt is None else [logprob(token, prompt) for token in ids[1:]]
        for token, finish in ((65, "length" if sampling.max_tokens == 1 else ""), (self.end, "stop")):
            found = [] if wanted is None else [logprob(token, wanted)]
            yield Row(id or 0, [token], finish, logprobs=found, prompt_logprobs=of_prompt)
            if finish:
                return
            of_prompt = []

    def send(self, message: Message) -> None: ...

    @property
    def serving(self) -> bool:
        return True


class AtOnce(Executor):
    """Without threads, of which handing over takes longer than most of the work does."""

    def submit(self, call: Any, /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


class Api:
    def __init__(self, folder: Path, family: str = "qwen3"):
        self.loop = asyncio.new_event_loop()
        model = folder / "model"
        size = write_tokenizer(model, family)
        tokenizer = Tokenizer(model, size)
        case = load_case("demo_chat")
        self.front = Front(case, Keys(), Engine(folder, size, tokenizer.hf.eos_token_id), threads=AtOnce())
        self.front.text = Text(case, tokenizer)
        self.app = App(self.front)

    def ask(self, path: str, body: bytes) -> None:
        """Raises Violation for an answer that is neither good nor one line of error."""
        status, answer, kind = self.loop.run_until_complete(self._ask(path, body))
        check_answer(status, answer, kind)
        if self.front.open or self.front.limits.open or self.front.limits.waiting_tokens or self.front.busy:
            raise Violation("the request is still counted")

    async def _ask(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        came, sent = [{"type": "http.request", "body": body, "more_body": False}], []

        async def receive() -> Any:
            if came:
                return came.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}
        await self.app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, receive, send)
        named = {key.lower(): value for key, value in sent[0]["headers"]}
        text = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], text, named.get(b"content-type", b"").decode()


def check_answer(status: int, body: bytes, kind: str) -> None:
    if status >= 500:
        raise Violation(f"status {status}: {body[:300]!r}")
    if kind.startswith("text/event-stream"):
        for block in body.decode().split("\n\n"):
            data = block.rpartition("data: ")[2]
            if data and data != "[DONE]" and not block.startswith(":"):
                json.loads(data)
    elif status != 200:
        error = json.loads(body)["error"]
        if "\n" in error["message"] or len(error["message"]) > LONGEST:
            raise Violation(f"an error of {len(error['message'])} characters: {error['message'][:200]!r}")
    elif kind.startswith("application/json"):
        json.loads(body)
