"""The line of the log for each request."""

import re

import pytest

from tests.fakes.clock import Clock
from tests.serving.api.front import Server, run, until
from umbra.serving.api.request_log import HttpRecord, Usage


def test_a_line_has_the_tokens_the_times_and_the_reasons() -> None:
    clock = Clock()
    record = HttpRecord("POST /v1/completions", clock)
    record.usage = Usage(12, 8, 5)
    for seconds in (0.5, 2.0):
        clock.now += seconds
        record.token()
    record.reasons = ["stop", "length", "stop"]
    assert record.line("m") == "m, 12 prompt tokens (8 cached), 5 generated, first after 0.50 s, 2.0/s, stop, length"


def test_a_header_says_what_is_not_done_in_plain_ascii() -> None:
    record = HttpRecord("")
    assert not record.warning()
    for _ in range(2):
        record.note('x: "é"\n is ignored')
    assert record.warning() == "299 umbra \"x: '?'  is ignored\""


def test_each_request_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(server: Server) -> None:
        await server.complete("secret", n=2)
        await server.chat(stream=True, stream_options={})
        await server.chat(temperature=-1)
        await server.ask("/tokenize", {"prompt": "a"})
        await server.get("/health")
        server.engine.step_s = 0.05
        gone = await server.open("/v1/completions", {"prompt": "x", "max_tokens": 900})
        await until(lambda: server.engine.running)
        gone.kill()
        await until(lambda: not server.front.open)

    run(scenario, "Hello! " * 20)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("req_")]
    assert "secret" not in "".join(lines)
    wanted = [
        r"demo_chat, 6 prompt tokens, 32 generated, first after [\d.]+ s, [\d.]+/s, length",
        r"demo_chat, \d+ prompt tokens, 141 generated, first after [\d.]+ s, [\d.]+/s, stop",
        r"POST /v1/chat/completions: 400 temperature: .*",
        r"POST /tokenize: 200",
        r"demo_chat, 1 prompt tokens, \d+ generated, .*abort",
    ]
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(rf"req_\w+: {pattern}", line), line


def test_no_line_where_none_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(server: Server) -> None:
        assert (await server.complete()).status == 200

    run(scenario, request_log=False)
    assert "req_" not in capsys.readouterr().out
