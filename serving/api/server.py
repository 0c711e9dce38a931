"""Runs a server: its port, its ranks, and its orderly end."""

import asyncio
import contextlib
import gc
import logging
import resource
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from umbra.base.errors import UserError
from umbra.base.progress import ProgressBar, progress
from umbra.executor.config.case import Case
from umbra.executor.config.env import node_env
from umbra.executor.config.load import load_model_config
from umbra.executor.launch.preflight import check_ready
from umbra.executor.plan.resolve import resolve
from umbra.serving.api.app import App
from umbra.serving.api.auth import ApiKeys, check_address, check_certificate
from umbra.serving.api.batches import BatchLine, answer_all, parsed
from umbra.serving.api.errors import ApiError
from umbra.serving.api.front import Front
from umbra.serving.ranks import messages
from umbra.serving.ranks.client import EngineClient
from umbra.serving.ranks.launcher import keep_ranks, launcher_of
from umbra.serving.ranks.messages import ChannelMessage, Fatal, Ready
from umbra.serving.ranks.supervisor import Supervisor

HEADER_S = 10.0  # seconds that a request's headers may take to come
UNREAD_S = 60.0  # seconds that a client may leave an answer unread
UNREAD = 1 << 18  # bytes of an answer that the system keeps for a client before it is slow
KEEP_S = 30  # seconds that a connection stays open between two requests
LOOK_S = 0.05
SWITCH_S = 0.0005  # after which a thread that reads a large request lets others go on; Python's own is ten times that
CLOSE_S = 2  # seconds that answers which are being sent have, when everything else has ended
MOST_CONNECTIONS = 1024
BACKLOG = 4096  # connections that wait to be accepted; the system drops what is beyond
ACCEPTED = 32  # connections that are accepted before others are served
FILES = 4 * MOST_CONNECTIONS


def serve(case: Case) -> None:
    """Serves a case until a signal asks it to end; the process then ends with the right status. On other nodes than the
    first, it only runs ranks."""
    load_model_config(case)  # refuse a wrong case before a port is opened
    check_ready(case)
    case = resolve(case, silent=node_env().node_rank > 0)
    settings = case.serve_config
    if node_env().node_rank:
        with tempfile.TemporaryDirectory(prefix="umbra-") as folder:
            sys.exit(keep_ranks(launcher_of(case, Path(folder)), settings.restarts))
    sys.setswitchinterval(SWITCH_S)
    keys = ApiKeys.read(settings.api_key_file)
    check_address(settings.host, keys)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    with listening(settings.host, settings.port) as listener:
        status = asyncio.run(ServerRun(case, keys).run(listener))
    sys.exit(status)


def run_batch(case: Case, data: bytes, output: Path) -> None:
    """Answers the requests in `data`, one a line, into the file `output`, with a server that nobody else can use; the
    process then ends with the right status."""
    lines, errors = parsed(data)
    if errors:
        raise UserError("; ".join(f"line {error['line']}: {error['message']}" for error in errors[:3]))
    try:
        output.touch()
    except OSError as error:
        raise UserError(f"--output-file {output}: cannot be written: {error.strerror}") from None
    load_model_config(case)
    check_ready(case)
    case = resolve(case, silent=False)
    with listening("127.0.0.1", 0) as listener:
        sys.exit(asyncio.run(_answer_batch(case, lines, output, listener)))


async def _answer_batch(case: Case, lines: list[BatchLine], output: Path, listener: socket.socket) -> int:
    """Returns the status that the process ends with; answers so far are in the file if it is another than 0."""
    run = ServerRun(case, ApiKeys.of([secrets.token_bytes(32)]), announced=False)
    ended = asyncio.create_task(run.run(listener))
    while run.front.state != "serving" and not ended.done():
        await asyncio.sleep(LOOK_S)
    failed = 0
    if not ended.done():
        with open(output, "wb") as file, progress("batch", len(lines), "requests") as shown:

            def take(good: bool, line: bytes) -> None:
                nonlocal failed
                failed += not good
                file.write(line)
                file.flush()
                shown.reach(shown.done + 1)

            work = asyncio.create_task(answer_all(run.front, lines, b"", take))
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            await asyncio.wait({work})
            print(f"{shown.done:.0f} of {len(lines)} requests answered, {failed} with errors: {output}", flush=True)
            whole = shown.done == len(lines)
        run.asked.set()
        return await ended or (0 if whole else 1)
    return ended.result() or 1


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once only on sockets that say that they are of TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)  # of the connections
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"serve_config.port: {host}:{port} cannot be used: {error.strerror}: give another by --port"
        ) from None
    with listener:
        yield listener


class ServerRun:
    """One server from its start to its end."""

    def __init__(self, case: Case, keys: ApiKeys, announced: bool = True):
        """`announced`: it says where it is when it is ready."""
        self.case, self.announced = case, announced
        self.signals: list[int] = []
        self.asked = asyncio.Event()  # at the first signal
        self.forced = asyncio.Event()  # at the second
        self.folder = tempfile.TemporaryDirectory(prefix="umbra-")  # only this user may enter it
        folder = Path(self.folder.name)
        self.client = EngineClient(folder / "engine", self._changed)
        self.supervisor = Supervisor(case, launcher_of(case, folder), self.client)
        self.front = Front(case, keys, self.client, self.supervisor)
        self.shown: ProgressBar | None = None  # of what the ranks do until they are ready

    async def run(self, listener: socket.socket) -> int:
        """Returns the status that the process ends with."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        with self.folder:
            await self.client.listen()
            server = make_server(self.front)
            http = asyncio.create_task(server.serve([listener]))
            ranks = asyncio.create_task(self.supervisor.run())
            try:
                status = await self._until_end(ranks)
                await self._first_of(self.supervisor.stop())
            finally:
                await self.supervisor.stop(0)
                self.front.live.close()
                server.should_exit, server.force_exit = True, self.forced.is_set()
                await asyncio.gather(http, ranks)
                self.client.close()
                self.front.close()
        return 128 + self.signals[-1] if self.forced.is_set() else status

    async def _until_end(self, ranks: "asyncio.Task[None]") -> int:
        """Serves until a signal comes or the ranks have failed, and lets requests end. -> the process's status"""
        text = asyncio.create_task(asyncio.to_thread(self.front.load_text))
        asked = asyncio.create_task(self.asked.wait())
        waiting: set[asyncio.Task[Any]] = {text, asked, ranks}
        try:
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if asked in done:
                    await self._drain()
                    return 0
                if ranks in done:
                    ranks.result()
                    await self._first_of(self._requests_end(), CLOSE_S)
                    return 1
                text.result()
                gc.collect()
                gc.freeze()  # collections no longer look through what was loaded, which stops all answers meanwhile
                self._announce()
        finally:
            asked.cancel()

    async def _drain(self) -> None:
        self.front.draining = True
        allowed = self.case.serve_config.drain_s
        if self.front.open:
            print(
                f"ending: {self.front.open} requests have up to {allowed:g} s; a second signal ends at once", flush=True
            )
        await self._first_of(self._requests_end(), allowed)
        self.client.reason = "the server has ended before this answer was complete"

    async def _requests_end(self) -> None:
        while self.front.open:
            await asyncio.sleep(LOOK_S)

    async def _first_of(self, work: Coroutine[Any, Any, None], allowed_s: float | None = None) -> None:
        """Waits for `work`, for at most `allowed_s` seconds, and no longer than until the second signal."""
        task, forced = asyncio.create_task(work), asyncio.create_task(self.forced.wait())
        await asyncio.wait({task, forced}, timeout=allowed_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (task, forced):
            waiting.cancel()
        await asyncio.wait({task, forced})

    def _take(self, number: int) -> None:
        self.signals.append(number)
        (self.forced if self.asked.is_set() else self.asked).set()

    def _changed(self, message: ChannelMessage) -> None:
        self.front.take(message)
        stage = message.stage if isinstance(message, messages.Progress) else ""
        if self.shown and self.shown.what != stage and (stage or isinstance(message, Ready | Fatal)):
            self.shown.close()
            self.shown = None
        if isinstance(message, messages.Progress):
            self.shown = self.shown or ProgressBar(stage, 1.0, "")
            self.shown.reach(message.share)
        if isinstance(message, Ready):
            self._announce()

    def _announce(self) -> None:
        if self.client.ready and self.front.text and self.announced:
            settings = self.case.serve_config
            scheme = "https" if settings.ssl_certfile else "http"
            print(f"ready: {self.front.name} at {scheme}://{settings.host}:{settings.port}", flush=True)
            if not self.front.text.tokenizer.template:
                print("chats are refused, completions served: no chat template (--chat-template FILE)", flush=True)


class Protocol(H11Protocol):
    """uvicorn's connection, which ends if its client is too slow. Where there are too many connections, the one that
    has been without a whole request for the longest ends, so that no number of them keeps others away."""

    idle: ClassVar[dict["Protocol", None]]  # connections of this server without a whole request; the oldest ones first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._reading: asyncio.TimerHandle | None = None  # while a request's headers are to come
        self._writing: asyncio.TimerHandle | None = None  # while the client does not read
        super().connection_made(transport)
        self.idle[self] = None
        self._reading = self.loop.call_later(HEADER_S, transport.abort)
        if len(self.connections) > MOST_CONNECTIONS:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            _cancel(self._reading)
            self._reading = None
        elif self._reading is None and not self.transport.is_closing():
            self._reading = self.loop.call_later(HEADER_S, self.transport.abort)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.idle.pop(self, None)

    def on_response_complete(self) -> None:
        self.idle[self] = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._reading)
        _cancel(self._writing)
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, msg).body()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with contextlib.suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True  # or the application would answer after this answer
            self.cycle.message_event.set()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


class HttpServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has one number for both

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `ServerRun` handles them


def make_server(front: Front) -> uvicorn.Server:
    """The HTTP server of `front`, which handles no signals."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # App reports what fails
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of clients and ranks that are gone
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(FILES, most)), most))

    class Connection(Protocol):
        idle: ClassVar[dict[Protocol, None]] = {}

    settings = front.case.serve_config
    config = uvicorn.Config(
        App(front),
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED,
        timeout_keep_alive=KEEP_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    return HttpServer(config)
