"""One server from its start to its end, and its connections, with ranks, clients and times that are made up."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from executor.config.load import load_case
from serving.api import server as module
from serving.api.auth import Keys
from serving.api.server import (
    CLOSE_S,
    HEADER_S,
    KEEP_S,
    MOST_CONNECTIONS,
    UNREAD,
    UNREAD_S,
    Protocol,
    Run,
    listening,
    make_server,
)
from serving.ranks.messages import Progress, Ready
from umbra.errors import UserError

READY = Ready(416, 4, 96, 16, 50, 2, [0], 100.0)


class Timer:
    def __init__(self, seconds: float, does: Callable[[], None]):
        self.seconds, self.does, self.cancelled = seconds, does, False

    def cancel(self) -> None:
        self.cancelled = True


class Transport:
    def __init__(self) -> None:
        self.written, self.aborted, self.closing = b"", False, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Task:
    def add_done_callback(self, call: Any) -> None: ...


class Wire:
    """A connection of a client; `timers` are those that the server's own protocol has started."""

    def __init__(self, kind: type[Protocol], state: ServerState):
        self.timers: list[Timer] = []
        self.transport = Transport()
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        self.protocol = kind(config, state, {}, cast(asyncio.AbstractEventLoop, self))
        self.protocol.connection_made(cast(asyncio.Transport, self.transport))

    def call_later(self, seconds: float, does: Callable[[], None]) -> Timer:
        timer = Timer(seconds, does)
        if getattr(does, "__self__", None) is self.transport:
            self.timers.append(timer)
        return timer

    def create_task(self, work: Any) -> Any:
        work.close()
        return Task()

    def waiting(self) -> list[float]:
        return [timer.seconds for timer in self.timers if not timer.cancelled]


async def app(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.fixture
def connect() -> Callable[[], Wire]:
    class Connection(Protocol):
        idle: ClassVar[dict[Protocol, None]] = {}

    state = ServerState()
    return lambda: Wire(Connection, state)


def test_headers_must_come_in_time(connect: Callable[[], Wire]) -> None:
    """From the first byte, or the connection's begin, to the last header."""
    wire = connect()
    assert wire.waiting() == [HEADER_S]
    assert wire.timers[0].does == wire.transport.abort
    wire.protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\n")
    assert len(wire.timers) == 1
    wire.protocol.data_received(b"content-length: 3\r\n\r\n")
    assert wire.waiting() == []
    assert list(wire.protocol.idle) == [wire.protocol]  # its body is to come
    wire.protocol.data_received(b"abc")
    assert list(wire.protocol.idle) == []
    wire.protocol.cycle.response_complete = True
    wire.protocol.conn.send(module.h11.Response(status_code=200, headers=[("content-length", "0")]))
    wire.protocol.conn.send(module.h11.EndOfMessage())
    wire.protocol.on_response_complete()
    assert list(wire.protocol.idle) == [wire.protocol]
    assert wire.waiting() == []
    wire.protocol.data_received(b"GET /")  # the next request begins
    assert wire.waiting() == [HEADER_S]
    wire.transport.closing = True
    wire.protocol._reading = None
    wire.protocol.data_received(b"x")
    assert len(wire.timers) == 2  # nobody waits for what does not come


def test_answers_must_be_read_in_time(connect: Callable[[], Wire]) -> None:
    wire = connect()
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    wire.protocol.pause_writing()
    assert not wire.protocol.flow._is_writable_event.is_set()
    assert wire.waiting() == [UNREAD_S]
    wire.protocol.resume_writing()
    assert wire.protocol.flow._is_writable_event.is_set()
    assert wire.waiting() == []
    wire.protocol.pause_writing()
    wire.protocol.connection_lost(OSError())
    assert wire.waiting() == []
    assert wire.protocol not in wire.protocol.connections


def test_a_lost_connection_leaves_nothing(connect: Callable[[], Wire]) -> None:
    wire = connect()
    wire.protocol.connection_lost(OSError())
    assert wire.waiting() == []
    assert not wire.protocol.idle
    assert not wire.protocol.connections


def test_of_too_many_connections_the_longest_idle_one_ends(connect: Callable[[], Wire], monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 2)
    first, second = connect(), connect()
    first.protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert not second.transport.aborted
    third = connect()
    assert (first.transport.aborted, second.transport.aborted, third.transport.aborted) == (False, True, False)
    assert list(third.protocol.idle) == [third.protocol]


def test_what_is_no_request_is_answered_with_an_error(connect: Callable[[], Wire]) -> None:
    wire = connect()
    wire.protocol.data_received(b"nonsense\r\n\r\n")
    head, _, body = wire.transport.written.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 400")
    assert {b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)} <= {*lines}
    assert b'"type":"invalid_request_error"' in body
    assert wire.transport.closing


def test_nonsense_behind_a_request_ends_its_answer(connect: Callable[[], Wire]) -> None:
    """Whose application must not write behind the error, and learns that nobody reads."""
    wire = connect()
    wire.protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    cycle = wire.protocol.cycle
    wire.protocol.send_400_response("Invalid HTTP request received.")
    assert wire.transport.written.startswith(b"HTTP/1.1 400")
    assert cycle.disconnected
    assert cycle.message_event.is_set()
    begun = connect()
    begun.protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    begun.protocol.conn.send(module.h11.Response(status_code=200, headers=[]))
    begun.protocol.send_400_response("Invalid HTTP request received.")
    assert begun.transport.written == b""  # in the middle of an answer
    assert begun.transport.closing
    done = connect()
    done.protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    done.protocol.cycle.response_complete = True
    done.protocol.send_400_response("x")
    assert not done.protocol.cycle.disconnected


def test_a_server_s_settings() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, before[1]), before[1]))
        server = make_server(cast(Any, SimpleNamespace(case=load_case("demo"), keys=Keys(()))))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert (soft, hard) == (min(4 * MOST_CONNECTIONS, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    config = server.config
    assert (config.timeout_keep_alive, config.timeout_graceful_shutdown) == (KEEP_S, CLOSE_S)
    assert (config.server_header, config.proxy_headers, config.access_log, config.ws) == (False, False, False, "none")
    assert (config.lifespan, config.log_config, config.backlog) == ("off", None, module.ACCEPTED)
    assert isinstance(config.http, type)
    assert issubclass(config.http, Protocol)


def test_a_port_can_be_taken_again_and_a_taken_one_is_named() -> None:
    with listening("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (UNREAD, 2 * UNREAD)  # Linux doubles it
        assert listener.proto == socket.IPPROTO_TCP
        host, port = listener.getsockname()
        listener.listen()
        with pytest.raises(UserError, match=rf"serve_config\.port: 127\.0\.0\.1:{port} cannot be used: "):
            listening(host, port).__enter__()
    assert listener.fileno() == -1


class Front:
    """What a run asks of its front."""

    def __init__(self) -> None:
        self.open, self.draining, self.closed = 0, False, False
        self.text: object = None
        self.name = "demo"
        self.taken: list[Any] = []
        self.live = SimpleNamespace(close=lambda: None)

    def load_text(self) -> None:
        self.text = object()

    def take(self, message: Any) -> None:
        self.taken.append(message)

    def close(self) -> None:
        self.closed = True


class Supervisor:
    """Its ranks run until they are stopped, or fail at once."""

    def __init__(self, fails: bool):
        self.fails, self.stops, self.ended = fails, list[float](), asyncio.Event()

    async def run(self) -> None:
        if not self.fails:
            await self.ended.wait()

    async def stop(self, wait_s: float = 10.0) -> None:
        self.stops.append(wait_s)
        self.ended.set()


class Http:
    """A server that serves until it should exit."""

    def __init__(self) -> None:
        self.should_exit = self.force_exit = False
        self.forced: list[bool] = []

    async def serve(self, sockets: list[Any]) -> None:
        while not self.should_exit:
            await asyncio.sleep(0)
        self.forced.append(self.force_exit)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module.gc, "freeze", lambda: None)
    monkeypatch.setattr(module.gc, "collect", lambda: None)

    def make(fails: bool = False) -> Run:
        found = Run(load_case("demo", ["serve_config.drain_s=0.02"]), "demo", [], Keys(()))
        found.front, found.supervisor = cast(Any, Front()), cast(Any, Supervisor(fails))
        http = Http()
        monkeypatch.setattr(module, "make_server", lambda front: http)
        return found

    return make


def ended(run: Run, does: Callable[[Run], Any]) -> int:
    """The status of the run, beside which `does` runs once its text is loaded."""

    async def both() -> int:
        task = asyncio.create_task(run.run(cast(Any, None)))
        while not run.front.text and not task.done():
            await asyncio.sleep(0)
        result = does(run)
        if asyncio.iscoroutine(result):
            await result
        return await task

    return asyncio.run(both())


def test_a_signal_ends_a_server_in_order(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = made()
    assert ended(run, lambda run: run._take(signal.SIGTERM)) == 0
    assert run.front.draining
    assert run.front.closed
    assert run.supervisor.stops == [10.0, 0]
    assert run.client.reason == "the server has ended before this answer was complete"
    assert not run.client.path.exists()
    assert not run.client.path.parent.exists()
    assert "ending" not in capsys.readouterr().out


def test_open_requests_may_end_first(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def finish(run: Run) -> None:
        front = cast(Any, run.front)
        front.open = 2
        run._take(signal.SIGINT)
        for _ in range(5):
            await asyncio.sleep(0)
        assert front.draining
        assert run.client.reason == ""
        assert run.supervisor.stops == []  # type: ignore[attr-defined]
        front.open = 0

    assert ended(made(), finish) == 0
    said = "ending: 2 requests have up to 0.02 s; a second signal ends at once"
    assert said in capsys.readouterr().out

    def leave(run: Run) -> None:
        cast(Any, run.front).open = 1  # which never ends
        run._take(signal.SIGTERM)

    assert ended(made(), leave) == 0


def test_a_second_signal_ends_a_server_at_once(made: Any) -> None:
    run = made()
    run.case = load_case("demo", ["serve_config.drain_s=1000"])

    async def twice(run: Run) -> None:
        cast(Any, run.front).open = 1
        run._take(signal.SIGTERM)
        await asyncio.sleep(0)
        assert not run.forced.is_set()
        run._take(signal.SIGINT)

    assert ended(run, twice) == 128 + signal.SIGINT
    assert run.supervisor.stops[-1] == 0


def test_ranks_that_fail_end_the_server(made: Any) -> None:
    assert ended(made(fails=True), lambda run: None) == 1


def test_ready_is_said_once_text_and_ranks_are(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = made()
    said = f"ready: demo at http://{run.case.serve_config.host}:{run.case.serve_config.port}\n"
    run.client.ready = READY
    run._changed(READY)
    assert capsys.readouterr().out == ""
    run.front.load_text()
    run._changed(Progress("loading", 0.5))
    assert capsys.readouterr().out == ""
    run._changed(READY)
    assert capsys.readouterr().out == said
    run.client.ready = None
    run._announce()
    assert capsys.readouterr().out == ""
    assert run.front.taken == [READY, Progress("loading", 0.5), READY]
    run.folder.cleanup()


def test_work_is_waited_for_no_longer_than_allowed(made: Any) -> None:
    run = made()

    async def waited(seconds: float, allowed_s: float | None) -> bool:
        done = False

        async def work() -> None:
            nonlocal done
            await asyncio.sleep(seconds)
            done = True

        await run._first_of(work(), allowed_s)
        assert len(asyncio.all_tasks()) == 1
        return done

    assert asyncio.run(waited(0.0, None))
    assert not asyncio.run(waited(60.0, 0.0))
    run.forced.set()
    assert not asyncio.run(waited(60.0, None))
    run.folder.cleanup()


@pytest.mark.parametrize("node", [0, 1])
def test_a_case_is_served_in_order(monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    """It is refused before a port is opened; another node than the first runs ranks only."""
    done: list[Any] = []
    case: Any = SimpleNamespace(
        serve_config=SimpleNamespace(restarts=4, api_key_file="keys", host="127.0.0.1", port=5), name="demo"
    )

    def told(name: str, result: Any = None) -> Any:
        def call(*given: Any) -> Any:
            done.append((name, *given))
            return result

        return call

    @contextlib.contextmanager
    def open_port(*given: Any) -> Iterator[str]:
        done.append(("listening", *given))
        yield "listener"
        done.append(("closed",))

    class Made:
        def __init__(self, *given: Any):
            done.append(("run", *given))

        async def run(self, listener: Any) -> int:
            done.append(("serve", listener))
            return 3

    for name, call in {
        "load_case": told("load", case), "load_model_config": told("model"), "check_ready": told("ready"),
        "keep_ranks": told("keep", 7), "check_address": told("address"), "listening": open_port, "Run": Made,
        "node_env": lambda: SimpleNamespace(node_rank=node),
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, call)
    monkeypatch.setattr(Keys, "read", lambda file: f"read {file}")
    monkeypatch.setattr("sys.setswitchinterval", told("switch"))
    with pytest.raises(SystemExit) as ended:
        module.serve("demo", ["a=1"])
    first = [("load", "demo", ["a=1"]), ("model", case), ("ready", case)]
    if node:
        assert (ended.value.code, done) == (7, [*first, ("keep", "demo", ["a=1"], 4)])
        return
    assert ended.value.code == 3
    assert done == [
        *first, ("switch", module.SWITCH_S), ("address", "127.0.0.1", "read keys"), ("listening", "127.0.0.1", 5),
        ("run", case, "demo", ["a=1"], "read keys"), ("serve", "listener"), ("closed",),
    ]  # fmt: skip


def test_what_a_run_is_made_of() -> None:
    case, keys = load_case("demo"), Keys(())
    run = Run(case, "name", ["a=1"], keys)
    supervisor = run.supervisor
    assert (supervisor.case, supervisor.name, supervisor.overrides) == (case, "name", ["a=1"])
    assert supervisor.client is run.client
    assert (run.front.case, run.front.keys, run.front.client, run.front.supervisor) == (
        case, keys, run.client, supervisor
    )  # fmt: skip
    assert run.client.changed == run._changed
    assert run.client.path.parent.stat().st_mode & 0o777 == 0o700
    assert (run.signals, run.asked.is_set(), run.forced.is_set()) == ([], False, False)
    run.folder.cleanup()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_of_the_system_end_a_server(made: Any, number: int) -> None:
    run = made()

    async def kill(run: Run) -> None:
        assert run.client.path.exists()  # ranks can connect
        os.kill(os.getpid(), number)
        while not run.asked.is_set():
            await asyncio.sleep(0)

    assert ended(run, kill) == 0
    assert run.signals == [number]


def test_a_port_that_cannot_be_used_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Refusing:
        def __init__(self, *of: Any):
            self.of, self.bound, self.closed = of, None, False
            self.options: list[Any] = []
            made.append(self)

        def setsockopt(self, *option: Any) -> None:
            self.options.append(option)

        def bind(self, address: Any) -> None:
            self.bound = address
            raise OSError(13, "Permission denied")

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("serving.api.server.socket.socket", Refusing)
    for host, family, bound in (("[::1]", socket.AF_INET6, "::1"), ("1.2.3.4", socket.AF_INET, "1.2.3.4")):
        with pytest.raises(UserError, match="cannot be used: Permission denied: --set port=ANOTHER"):
            listening(host, 80).__enter__()
        found = made.pop()
        assert found.of == (family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        assert (found.bound, found.closed) == ((bound, 80), True)
        assert found.options[0] == (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def test_a_server_takes_a_crowd_and_leaves_signals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are listened on again with room for all who wait; loggers are quiet."""
    listened: list[int] = []

    async def startup(self: Any, sockets: Any = None) -> None:
        listened.append(-1)

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    limits: list[Any] = []
    monkeypatch.setattr("serving.api.server.resource.getrlimit", lambda what: (100, 3000))
    monkeypatch.setattr("serving.api.server.resource.setrlimit", lambda *given: limits.append(given))
    server = make_server(cast(Any, SimpleNamespace(case=load_case("demo"), keys=Keys(()))))
    assert limits == [(resource.RLIMIT_NOFILE, (3000, 3000))]
    listeners: list[Any] = [SimpleNamespace(listen=listened.append)] * 2
    asyncio.run(server.startup(listeners))
    assert listened == [-1, 4096, 4096]
    asyncio.run(server.startup())
    before = signal.getsignal(signal.SIGINT)
    with server.capture_signals():
        assert signal.getsignal(signal.SIGINT) is before
    assert isinstance(server, module.HttpServer)
    assert logging.getLogger("uvicorn.error").level == logging.CRITICAL
    assert logging.getLogger("asyncio").level == logging.ERROR
    for soft, hard, wanted in ((9000, 10_000, 9000), (100, 10_000, 4096)):
        limits.clear()
        monkeypatch.setattr("serving.api.server.resource.getrlimit", lambda what, found=(soft, hard): found)
        make_server(cast(Any, SimpleNamespace(case=load_case("demo"), keys=Keys(()))))
        assert limits == [(resource.RLIMIT_NOFILE, (wanted, hard))]


def test_a_run_leaves_nothing(made: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its garbage is looked through once; streams of pages, connections and ranks have ended before it has."""
    done: list[str] = []
    monkeypatch.setattr("serving.api.server.gc.collect", lambda: done.append("collect"))
    monkeypatch.setattr("serving.api.server.gc.freeze", lambda: done.append("freeze"))
    run = made()
    front, supervisor, client = cast(Any, run.front), cast(Any, run.supervisor), run.client
    front.live = SimpleNamespace(close=lambda: done.append("pages"))
    wait, close = supervisor.run, client.close

    async def ranks() -> None:
        await wait()
        for _ in range(5):
            await asyncio.sleep(0)
        done.append("ranks")

    def closed() -> None:
        done.append("client")
        close()

    supervisor.run, client.close = ranks, closed
    front.close = lambda: done.append("front")

    async def stop(run: Run) -> None:
        while "freeze" not in done:
            await asyncio.sleep(0)
        run._take(signal.SIGTERM)

    client.ready = READY
    assert ended(run, stop) == 0
    assert done == ["collect", "freeze", "pages", "ranks", "client", "front"]
    assert capsys.readouterr().out.count("ready: demo at ") == 1


def test_what_fails_within_a_run_ends_it(made: Any) -> None:
    run = made()

    def fails() -> None:
        raise UserError("the tokenizer is odd")

    cast(Any, run.front).load_text = fails
    with pytest.raises(UserError, match="the tokenizer is odd"):
        ended(run, lambda run: None)
    assert cast(Any, run.supervisor).stops == [0]
    broken = made()

    async def breaks() -> None:
        raise RuntimeError("the supervisor broke")

    cast(Any, broken.supervisor).run = breaks
    with pytest.raises(RuntimeError, match="the supervisor broke"):
        ended(broken, lambda run: None)


def test_answers_that_are_sent_when_ranks_fail_may_end(made: Any) -> None:
    run = made(fails=True)
    front = cast(Any, run.front)
    front.open = 1
    waited: list[Any] = []
    first_of = run._first_of

    async def recorded(work: Any, allowed_s: float | None = None) -> None:
        waited.append((work.__name__, allowed_s))
        front.open = 0
        await first_of(work, allowed_s)

    run._first_of = recorded
    assert ended(run, lambda run: None) == 1
    assert waited == [("_requests_end", CLOSE_S), ("stop", None)]
