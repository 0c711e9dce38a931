"""What rank 0 tells of its experts and memory, and that it does not record every step for ever."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.ranks import worker as module
from serving.ranks.messages import Message, Out, Residency, Sampling, State, Stop, Submit, Watch
from serving.ranks.worker import Worker
from tests.executor.engine.test_offload import MB, model, runner_of  # noqa: F401 (a fixture)


class Front:
    """Stands for rank 0's channel: gives each tick the next of `script`, and keeps what is sent."""

    behind = False

    def __init__(self, script: list[list[Message]]):
        self.script, self.sent = script, []
        self.most_steps = 0

    def receive(self, wait_s: float) -> list[Message]:
        offload = self.worker.engine.offload
        self.most_steps = max(self.most_steps, len(offload.history.steps), len(self.worker.loop.timings.per_token))
        return self.script.pop(0) if self.script else [Stop()]

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def serve(model: Path, folder: Path, script: list[list[Message]]) -> Front:  # noqa: F811
    front = Front(script)
    runner = runner_of(model, folder, mode="elastic", arena_mb=MB, max_swaps=8)
    front.worker = Worker(runner, front)  # type: ignore[arg-type]
    front.worker.run()
    return front


def asked(id: int) -> Submit:
    return Submit(id, [5 + id, 17, 3, 9] * (1 + id % 4), Sampling(max_tokens=20, ignore_eos=True))


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATE_S", 0.0)
    monkeypatch.setattr(module, "RESIDENCY_S", 0.0)


def test_a_snapshot_tells_of_experts_and_memory(model: Path, tmp_path: Path) -> None:  # noqa: F811
    script: list[list[Message]] = [[Watch(True), *map(asked, range(8))], *[[] for _ in range(90)]]
    front = serve(model, tmp_path, script)
    states, offload = front.of(State), front.worker.engine.offload
    assert offload
    for state in states:
        kept = state.groups[0].held + state.groups[0].kept
        assert kept + state.expert_frames + state.free_frames == state.arena_frames - 1  # one page is padding
        assert state.experts_resident <= state.experts == 16
    assert max(state.waiting for state in states) == len(max((s.queue for s in states), key=len)) == 5
    assert max(state.experts_resident for state in states) > 0
    hits, misses = ([getattr(state, name) for state in states] for name in ("expert_hits", "expert_misses"))
    assert hits == sorted(hits)
    assert misses == sorted(misses)
    # Steps that decode only: each of their tokens has three experts in each of two layers.
    decoded = sum(tokens for state in states for tokens in state.step_tokens if tokens <= 3)
    assert hits[-1] + misses[-1] == decoded * 3 * 2
    computed = sum(tokens for state in states for tokens in state.step_tokens)
    assert computed == sum(len(asked(id).ids) + 19 for id in range(8))
    rows = [row for out in front.of(Out) for row in out.rows]
    waited = {row.id: row.queued_s for row in rows if row.queued_s}
    assert waited.keys() == set(range(8))
    assert max(waited[id] for id in range(3)) < min(waited[id] for id in range(3, 8))

    found = front.of(Residency)
    assert len({r.resident for r in found}) > 2
    assert all(first != second for first, second in itertools.pairwise(found))
    bits = np.unpackbits(np.frombuffer(found[-1].resident, np.uint8), bitorder="little")
    assert (bits.reshape(2, 8) == offload.published).all()
    assert {max(r.heat) for r in found[1:]} == {255}


def test_residency_is_sent_to_those_who_watch_only(model: Path, tmp_path: Path) -> None:  # noqa: F811
    idle: list[list[Message]] = [[] for _ in range(30)]
    front = serve(
        model, tmp_path, [[*map(asked, range(3))], *idle, [Watch(True)], *idle, [Watch(False), asked(4)], *idle]
    )
    assert len(front.of(Residency)) == 1  # nothing has changed while somebody watched


def test_steps_are_not_recorded_for_ever(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STATE_S", 1e9)
    monkeypatch.setattr(module, "FORGET_STEPS", 16)
    front = serve(model, tmp_path, [[*map(asked, range(12))], *[[] for _ in range(120)]])
    assert len(front.of(Out)) > 60
    assert 0 < front.most_steps <= 16
