"""Which cores the engine's pool and the shadow pool get, on made-up machines."""

from pathlib import Path

import pytest

from ops.cpu import engine
from tests.ops.cpu.test_numa import make_tree, module, one_thread_afterwards

__all__ = ["one_thread_afterwards"]  # a fixture that is used here too


def divided(
    root: Path, nodes: dict[int, str], device: int, shadow: int, rank: int = 0, ranks: int = 1
) -> list[list[tuple[int, ...]]]:
    """(memory, threads, first and last CPU) of the teams of both pools."""
    cpus = 1 + max(int(text.rpartition("-")[2]) for text in nodes.values())
    mine = module.share(module.read_nodes(str(make_tree(root, nodes)), list(range(cpus))), rank, ranks)
    pools = module.divide(mine, device, shadow)
    return [[(t.memory, t.threads, *(t.cpus[:: max(1, len(t.cpus) - 1)])) for t in teams] for teams in pools]


def test_two_pools_divide_the_cores(tmp_path: Path) -> None:
    """Of each pool: node, threads, first and last CPU."""
    four = {n: f"{24 * n}-{24 * n + 23}" for n in range(4)}
    assert divided(tmp_path, {0: "0-1"}, 2, 1) == [[(-1, 2)], [(-1, 1)]]  # too small: wherever the system puts them
    assert divided(tmp_path, {0: "0-1"}, 1, 1) == [[(-1, 1)], [(-1, 1)]]
    assert divided(tmp_path, {0: "0-15"}, 8, 4) == [[(-1, 8, 0, 11)], [(-1, 4, 12, 15)]]
    assert divided(tmp_path, {0: "0-15"}, 15, 1) == [[(-1, 15, 0, 14)], [(-1, 1, 15)]]
    assert divided(tmp_path, {0: "0-15"}, 16, 1) == [[(-1, 16)], [(-1, 1)]]
    assert divided(tmp_path, {0: "0-15"}, 16, 0) == [[(-1, 16)], []]
    assert divided(tmp_path, four, 64, 32) == [
        [(n, 16, 24 * n, 24 * n + 15) for n in range(4)], [(n, 8, 24 * n + 16, 24 * n + 23) for n in range(4)],
    ]  # fmt: skip
    one = [(0, 23, 0, 22), *((n, 24, 24 * n, 24 * n + 23) for n in (1, 2, 3))]
    assert divided(tmp_path, four, 95, 1) == [one, [(0, 1, 23)]]
    assert divided(tmp_path, four, 96, 4) == [
        [(n, 24, 24 * n, 24 * n + 23) for n in range(4)], [(n, 1, 24 * n, 24 * n + 23) for n in range(4)],
    ]  # fmt: skip
    for rank in range(2):
        assert divided(tmp_path, four, 36, 12, rank, 2) == [
            [(n, 18, 24 * n, 24 * n + 17) for n in (2 * rank, 2 * rank + 1)],
            [(n, 6, 24 * n + 18, 24 * n + 23) for n in (2 * rank, 2 * rank + 1)],
        ]


def test_the_engine_leaves_cores_to_the_shadow_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`threads: 0` takes what shadows leave; with as many the shadow pool gets just those, and a copier may use all."""
    nodes = module.read_nodes(str(make_tree(tmp_path, {0: "0-7", 1: "8-15"})), list(range(16)))
    monkeypatch.setattr(engine, "own_nodes", lambda: nodes)
    engine.start(0, "auto", rank=1, ranks=2, shadow=3)
    (device,), (shadow,) = module.teams(), engine.shadow_teams(3)
    assert (device.memory, device.threads, device.cpus) == (1, 5, [8, 9, 10, 11, 12])
    assert (shadow.memory, shadow.threads, shadow.cpus) == (1, 3, [13, 14, 15])
    assert engine.own_cpus() == list(range(8, 16))
