"""schemathesis asks the front what its own description allows, and more, and finds no answer that breaks it."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.serving.api.front import Server, serving
from umbra.serving.api import app

pytest.importorskip("schemathesis")  # which needs Python 3.11

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = ["--phases=examples,coverage,fuzzing", "--seed=1", "--max-examples=4", "--generation-database=none"]


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_asked_gives_an_answer_that_is_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbra.serving.api.body.BODY_S", 1.0)  # some requests announce a body that does not come

    async def scenario(server: Server) -> None:
        url = f"http://127.0.0.1:{server.port}/openapi.json"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            url,
            f"--checks={CHECKS}",
            *OPTIONS,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        assert f"Tested: {len(app.ROUTES) - 1}" in output, output  # all but the description itself

    async def whole() -> None:
        async with serving("Hi") as server:
            await scenario(server)

    asyncio.run(whole())
