"""The state that all routes of the server share: the engine's client, the tokenizer, grammars, limits, and the server's
state."""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from umbra.base.errors import listed, one_line
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.executor.config.case import Case
from umbra.executor.config.load import load_model_config, model_folder
from umbra.executor.engine.schedule.request import Request
from umbra.models.tokenizers import tokenizer_in
from umbra.serving.api.auth import ApiKeys
from umbra.serving.api.compiling import Compiler
from umbra.serving.api.errors import ApiError, unavailable
from umbra.serving.api.files import Files
from umbra.serving.api.limits import Admission, Ticket
from umbra.serving.api.live import Live
from umbra.serving.api.metrics import Metrics
from umbra.serving.api.request_log import CURRENT, LONGEST_NOTE
from umbra.serving.ranks.client import EngineClient, EngineGone, RequestRefused
from umbra.serving.ranks.messages import ChannelMessage, Ready, Row, Submit
from umbra.serving.ranks.supervisor import Supervisor
from umbra.text.formats import THINK, OutputMarks
from umbra.text.tokenizer import Tokenizer

THREADS = 2
MOST_JOBS = 64  # of the threads, waiting ones included
MOST_NOTES = 256  # of what requests do not get
LOOK_S = 0.5  # seconds between two looks at whether a request still waits

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServedJob:
    """One sequence of the engine, and what its text depends on."""

    request: Request
    stops: tuple[str, ...] = ()
    whole: bool = False  # special tokens are text of the answer
    shows_stop: bool = False  # and so is the stop string that ends it


class Front:
    """`client` listens for rank 0; `supervisor` starts the ranks, or None where somebody else does; `threads` do what
    would hold up the event loop."""

    def __init__(
        self,
        case: Case,
        keys: ApiKeys,
        client: EngineClient,
        supervisor: Supervisor | None = None,
        threads: Executor | None = None,
    ):
        self.case, self.keys, self.client, self.supervisor = case, keys, client, supervisor
        self.limits = Admission(case.serve_config)
        self.metrics = Metrics(self.name, disk=bool(case.cache_config.disk_path))
        self.live = Live(client, self.metrics, lambda: {"model": self.name, **self.status})
        self.files = Files()
        self.draining = False
        self.created = int(time.time())
        self.unread: set[str] = set()  # names of fields that requests had and nothing reads
        self._noted: set[str] = set()  # what `note` has been told
        self.text: Text | None = None  # when it is loaded
        self.open = 0  # HTTP requests that are answered, other than GET
        self._threads = threads or ThreadPoolExecutor(THREADS, thread_name_prefix="front")
        self.busy = 0  # jobs that the threads have
        self._turn = asyncio.Lock()
        self._in_line = 0  # large requests that have the turn or wait for it

    @property
    def names(self) -> list[str]:
        """The model's names in the API."""
        return self.case.serve_config.served_model_name.split() or [self.case.name]

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if self.supervisor and self.supervisor.failed:
            return "failed"
        if not self.client.ready or not self.text:
            return "loading"
        return "serving" if self.client.serving else "silent"

    @property
    def status(self) -> dict[str, str | float | None]:
        """`state`, and what there is to say about it."""
        body: dict[str, str | float | None] = {"status": self.state}
        if self.state == "loading":
            progress = self.client.progress
            body |= {"stage": progress.stage, "progress": progress.share, "reason": self.client.reason or None}
        elif self.state == "failed" and self.supervisor:
            body["reason"] = self.supervisor.failed
        return body

    def check_serving(self) -> tuple[Ready, "Text"]:
        """Raises ApiError unless requests are taken."""
        if self.draining:
            raise unavailable("the server is about to end", "draining")
        if self.client.ready and self.text:
            return self.client.ready, self.text
        if self.supervisor and self.supervisor.failed:
            raise unavailable(f"the ranks have ended: {self.supervisor.failed}", "engine_gone")
        progress = self.client.progress
        raise unavailable(f"the model is loading: {progress.stage} ({progress.share:.0%})", "loading", 5)

    def check_model(self, name: str | None) -> None:
        if name and name not in (*self.names, self.case.name):
            raise ApiError(
                404, f"there is no model {name:.80}: this server has {listed(self.names)}", "model", "model_not_found"
            )

    def load_text(self) -> None:
        """Loads the tokenizer, and has the compiler of grammars load it at the same time; takes seconds."""
        folder, config = model_folder(self.case), load_model_config(self.case)
        compiler = Compiler(folder, config.vocab_size, stop_ids(folder, config.eos_token_ids))
        started = self._threads.submit(compiler.start)
        try:
            tokenizer = tokenizer_in(folder, config.vocab_size, self.case.model_config.chat_template)
            started.result()
            self.text = Text(self.case, tokenizer, compiler)
        except BaseException:
            compiler.close()
            raise

    def note(self, text: str) -> None:
        """Says what this request asks for and does not get: in its answer, and once in the log."""
        if record := CURRENT.get():
            record.note(text)
        if text not in self._noted and len(self._noted) < MOST_NOTES:
            self._noted.add(text)
            print(one_line(text)[:LONGEST_NOTE], flush=True)

    async def work(self, call: Callable[[], Result]) -> Result:
        """Runs `call` in one of few threads, so that the event loop goes on."""
        if self.busy >= MOST_JOBS:
            raise _too_many()
        self.busy += 1
        try:
            context = contextvars.copy_context()
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: context.run(call))
        finally:
            self.busy -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The turn of a large request: one is read at a time."""
        if self._in_line >= MOST_JOBS:
            raise _too_many()
        self._in_line += 1
        try:
            async with self._turn:
                yield
        finally:
            self._in_line -= 1

    def admit(self, tokens: int, sequences: int) -> Ticket:
        ready, _ = self.check_serving()
        state = self.client.state
        return self.limits.admit(tokens, sequences, ready, (state and state.prefill_rate) or ready.prefill_rate)

    async def rows(self, job: ServedJob, ticket: Ticket) -> AsyncGenerator[Row, None]:
        """The rows of one sequence. Raises ApiError if it cannot run, waits too long, or the ranks end."""
        started = False
        while True:
            id = self.client.next_id()
            rows = self.client.rows(Submit.of(id, job.request))
            try:
                async with aclosing(rows):
                    if not started:
                        row = await self._first(rows, id)
                        started = True
                        ticket.started(len(job.request.ids))
                        yield row
                    async for row in rows:
                        yield row
                return
            except RequestRefused as error:
                raise ApiError(400, str(error)) from None
            except EngineGone as error:
                if started or not await self._back():
                    raise ApiError(500 if started else 503, str(error), None, "engine_gone") from None

    async def _first(self, rows: AsyncGenerator[Row, None], id: int) -> Row:
        """The first row; raises ApiError if the request waits, and does not run, longer than is allowed."""
        allowed = self.case.serve_config.queue_timeout_s
        row = asyncio.ensure_future(anext(rows))
        since = time.monotonic()
        try:
            while not (await asyncio.wait({row}, timeout=min(LOOK_S, allowed)))[0]:
                state = self.client.state
                runs = state is not None and any(running.id == id for running in state.running)
                if not runs and time.monotonic() - since > allowed:
                    self.limits.refused["timeout"] += 1
                    raise unavailable(f"the request has waited for {allowed:g} s", "queue_timeout", 5)
            return row.result()
        finally:
            if not row.done():
                row.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await row

    async def _back(self) -> bool:
        """Waits for ranks that are started again. -> whether they are back"""
        end = time.monotonic() + self.case.serve_config.queue_timeout_s
        while self.supervisor and not self.supervisor.failed and not self.supervisor.stopping:
            if self.client.ready:
                return True
            if time.monotonic() > end:
                break
            await asyncio.sleep(LOOK_S)
        return False

    def take(self, message: ChannelMessage) -> None:
        """To be called with each message of the engine that is not a row."""
        self.metrics.take(message)
        self.live.take(message)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.text:
            self.text.close()


def _too_many() -> ApiError:
    return ApiError(429, "too many requests are read at this moment; try again in 1 s", None, "queue_full", 1)


class Text:
    """The checkpoint's tokenizer and what depends on it."""

    def __init__(self, case: Case, tokenizer: Tokenizer, compiler: Compiler):
        self.tokenizer, self.compiler = tokenizer, compiler
        self.format: OutputMarks | None = tokenizer.format(case.model_config.output_format)
        think = self.format.think if self.format else THINK
        self.reasons = think in tokenizer.template or (self.format is not None and bool(self.format.tokens))
        self.splits = case.model_config.reasoning == "split"
        marks = (*tokenizer.conventions.tags, *tokenizer.marks.values())
        # Those marks of reasoning and tool calls that grammars take for special tokens.
        self.mark_ids = {mark: tokenizer.atoms[mark] for mark in marks if mark in tokenizer.atoms}

    def close(self) -> None:
        self.compiler.close()
