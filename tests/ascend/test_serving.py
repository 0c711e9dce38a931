"""The loop of a server's rank with captured decode graphs on the fake device: rows that pad a graph stay out of what
the front is told, and prefixes and preempted requests give the tokens that a request gets alone."""

from pathlib import Path

import pytest

from executor.serving.messages import State
from tests.ascend.engine import ascend_case, ascend_runner
from tests.serving.scripted import Server


@pytest.mark.parametrize("mode", ["acl_graph", "npugraph_ex"])
def test_padded_steps_prefixes_and_preemption(tmp_path: Path, mode: str) -> None:
    """Three requests run in a graph for four. The arena has six pages of 128 tokens: the youngest request is preempted,
    and its prefix found when it is resumed."""
    sizes = ["input_max_len=160", "max_new_tokens=250", "offload_config.mode=elastic", "serve_config.reserve=0"]
    case = ascend_case(
        tmp_path, f"exe_mode={mode}", "strict=true", "offload_config.arena_mb=0.9", *sizes, max_position_embeddings=512
    )
    server = Server(ascend_runner(case, tmp_path))
    worker, script = server.worker, server.script
    captured = worker.engine.decode_step.compiles  # type: ignore[attr-defined]
    asked = {id: [(7 * id + i) % 90 for i in range(120 + id)] for id in range(3)}
    for id, ids in asked.items():
        server.submit(id, ids, 220)
    server.finish()
    assert worker.preemptions > 0
    assert worker.engine.decode_step.compiles == captured  # type: ignore[attr-defined]  # all in the warm-up
    rows = [row for id in asked for row in script.rows(id)]
    assert len(rows) == sum(len(out.rows) for out in script.sent if hasattr(out, "rows"))  # of no other id
    assert worker._generated == 3 * 220
    assert all(len(state.running) <= 3 for state in script.of(State))
    for id, ids in asked.items():
        assert server.answer(10 + id, ids, 220) == script.tokens(id)
    assert script.rows(10)[0].found == 0
    again = server.answer(20, [*asked[2], *script.tokens(2)[:50]], 5)
    assert again == script.tokens(2)[50:55]
    assert script.rows(20)[0].found == 128
    assert all(cache.held == 0 for cache in worker.loop.scheduler.caches)
