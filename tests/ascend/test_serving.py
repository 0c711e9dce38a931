"""The loop of a server's rank on Ascend: captured decode graphs on the fake device while requests come and go, and the
values of the Ascend ops in plain CPU code, padding rows included."""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ascend.engine import CAPTURE_MODES, SIZES, ascend_case, ascend_runner, node
from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log
from tests.ascend.on_cpu import ascend_on_cpu
from tests.ascend.workers import close_nodes
from tests.fakes.scripted import Script, Server
from tests.tiny import ONE_RANK, save_tiny, tiny_case
from tests.variants import thorough_but
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.model_runner import make_runner
from umbra.ops.ascend.shadow import ShadowNodes
from umbra.serving.ranks.messages import Out

LENGTHS = ("input_max_len=160", "max_new_tokens=250", "strict=true")
# The arena has room for a few experts and for six pages of 128 tokens.
ELASTIC = (*LENGTHS, "offload_config.mode=elastic", "offload_config.arena_mb=0.9", "serve_config.reserve=0")
ASKED = {id: [(7 * id + i) % 90 for i in range(120 + id)] for id in range(3)}  # three run in a graph for four
NEW = 145  # tokens: the requests begin in their first page and end in their third


def next_token(ids: list[int]) -> int:
    return (31 * ids[-1] + 7 * ids[len(ids) // 2] + len(ids)) % 90


def choose(engine: Engine, logits: Tensor, groups: list[list[Sequence]]) -> list[int]:
    """In place of `Engine.choose`: the fake device computes no values, so a request's next token follows from its
    tokens."""
    return [
        next_token(s.ids[:end].tolist())
        for of in groups
        for s in of
        for end in range(len(s.ids) - s.drafted, len(s.ids) + 1)
    ]


@pytest.fixture
def device_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(Engine, "choose", choose)
    monkeypatch.setattr(ShadowNodes, "make_node", node)


def check_answers(script: Script, tokens: int) -> None:
    for id, ids in ASKED.items():
        known = list(ids)
        for _ in range(tokens):
            known.append(next_token(known))
        assert script.tokens(id) == known[len(ids) :]
        assert script.ended(id)


@pytest.mark.thorough
@pytest.mark.usefixtures("device_that_answers")
@pytest.mark.parametrize("mode", [*CAPTURE_MODES, *thorough_but(["ge_graph"])])
def test_graphs_are_made_once_while_requests_come_and_go(tmp_path: Path, mode: str) -> None:
    """Each step that only decodes runs one graph, and no graph is made after the warm-up: not when a request is
    preempted, finds its prefix and is resumed, not when one is aborted, and not when experts move. GE graphs cannot
    have shadow experts, so there nothing is preempted."""
    captured = mode != "ge_graph"
    sizes = ELASTIC if captured else LENGTHS
    case = ascend_case(tmp_path, f"exe_mode={mode}", *sizes, max_position_embeddings=512)
    with nullcontext() if captured else ge_programs():
        check_graphs(Server(ascend_runner(case, tmp_path)), captured)


def check_graphs(server: Server, captured: bool) -> None:
    worker, script, shadows = server.worker, server.script, server.worker.engine.shadows
    graphs: Any = worker.engine.decode_step
    assert sorted(graphs.graphs) == [(1,), (2,), (4,)]
    compiles = graphs.compiles
    assert compiles == 3
    resident = set()  # numbers of experts
    with device_log() as log:
        server.answer(9, [1, 2, 3], 30)
        resident.add(len(shadows.slots) if shadows else 0)
        script.sent.clear()
        worker.generated = 0
        for id, ids in ASKED.items():
            server.submit(id, ids, NEW)
        server.finish()
        resident.add(len(shadows.slots) if shadows else 0)
    assert (worker.preemptions > 0) == captured
    assert (len(resident) > 1) == captured
    check_answers(script, NEW)
    rows = [row for out in script.of(Out) for row in out.rows]
    assert {row.id for row in rows} == set(ASKED)  # no row of a graph's padding
    assert sum(len(row.tokens) for row in rows) == worker.generated == 3 * NEW
    server.submit(10, ASKED[0], NEW)
    server.submit(11, ASKED[1], NEW)
    for _ in range(9):
        worker.turn()
    server.abort(10)
    again = server.answer(12, [*ASKED[2], *script.tokens(2)[:50]], 5)
    assert again == script.tokens(2)[50:55]
    assert script.rows(12)[0].cached_tokens == 128
    assert graphs.compiles == compiles
    assert not [line for line in log.lines if line.startswith(("captured", "capture begin"))]
    assert (sum(line.startswith("replay graph") for line in log.lines) > NEW) == captured
    assert all(cache.held == 0 for cache in worker.loop.scheduler.caches)


@pytest.mark.thorough
def test_answers_are_those_of_each_request_alone(tmp_path: Path) -> None:
    """The Ascend ops' values, with three rows of padding in each decode step: random traffic with prefixes, preemption
    and experts that move gives every request the tokens that it gets alone."""
    save_tiny(tmp_path / "model", **SIZES)
    case = tiny_case(
        tmp_path,
        tmp_path / "model",
        cache_config={"page_size": 16},
        exe_mode="eager",
        data_config={"input_max_len": 64, "max_new_tokens": 64, "batch_size": 4, "mixed_prefill_size": 16},
        offload_config={"mode": "elastic", "arena_mb": 400 / 1024, "max_swaps": 4},
        serve_config={"reserve": 0, "prefix_floor": 0},
    )
    runner = make_runner(case, tmp_path, ONE_RANK)
    runner.setup(ascend_on_cpu("fusion_v2"))
    server, draw = Server(runner), random.Random(3)
    worker, script = server.worker, server.script
    start = [draw.randrange(96) for _ in range(40)]
    asked: dict[int, tuple[list[int], int, dict[str, Any]]] = {}
    for id in range(12):
        ids = [*start[: draw.choice((0, 20, 40))], *(draw.randrange(96) for _ in range(20))]
        asked[id] = (ids, draw.randint(20, 60), {"temperature": draw.choice((0.0, 1.0)), "seed": id})
        server.submit(id, *asked[id][:2], **asked[id][2])
        for _ in range(draw.randrange(12)):
            worker.turn()
    server.finish()
    assert worker.preemptions > 0
    assert sum(script.rows(id)[0].cached_tokens > 0 for id in asked) > 2
    for id, (ids, tokens, sampling) in asked.items():
        for cache in worker.loop.scheduler.caches:
            cache.trim(0)
        assert script.tokens(id) == server.answer(100 + id, ids, tokens, **sampling)
    close_nodes()
