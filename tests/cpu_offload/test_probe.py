"""The replays of which the planner of shadow experts measures the time."""

import torch

from cpu_offload.planner import probe
from cpu_offload.planner.model import Shape
from ops.cpu import engine, shadow
from ops.format import FORMATS


def test_a_replay_takes_the_next_experts_and_blocks() -> None:
    """Two tokens with two of five experts, which share three blocks; all experts are alike, so the sums are known."""
    engine.start(1, "auto")
    blocks = shadow.ExpertBlocks(32, 32, FORMATS["float32"])
    made = probe.made_up(blocks, 3)
    assert len(made) == 3
    pool = shadow.ShadowPool([engine.native.Team(-1, 1, [])])
    one = probe.Probe(pool, blocks, made, Shape(layers=1, experts=5, top_k=2), 2)
    assert [one.pairs(experts) for experts in (0, 1, 2, 9)] == [0, 2, 4, 4]
    assert one.ids.tolist() == [[5, 5], [5, 5]]
    level = torch.tensor([0x3C3C3C3C], dtype=torch.int32).view(torch.float32).item()
    hidden = torch.nn.functional.silu(torch.tensor(0.32 * level)) * 0.32 * level
    whole = 32 * float(hidden) * level

    def replay(resident: int, missing: int) -> tuple[list[int], list[int], list[int]]:
        """(times that each expert was used, the blocks of the resident ones, the blocks of all)"""
        before = one.layer.counts.clone()
        assert one(resident, missing) > 0
        blocks_of = {0: -1} | {address: number for number, address in enumerate(one.addresses.tolist())}
        device, store = (
            [blocks_of[address] for address in table.tolist()] for table in (one.layer.device, one.layer.store)
        )
        return (one.layer.counts - before).tolist(), device, store

    assert replay(0, 0) == ([0] * 5, [-1] * 5, [-1] * 5)
    assert one.kept[3].tolist() == [[0.0] * 32] * 2
    assert replay(1, 2) == ([2, 1, 1, 0, 0], [0, -1, -1, -1, -1], [0, 1, 2, -1, -1])
    torch.testing.assert_close(one.kept[3], torch.full((2, 32), whole), rtol=1e-4, atol=0)
    assert replay(0, 1) == ([0, 0, 0, 2, 0], [-1] * 5, [0, 1, 2, 0, -1])
    torch.testing.assert_close(one.kept[3], torch.full((2, 32), whole / 2), rtol=1e-4, atol=0)  # one of two experts
    assert replay(3, 0) == ([1, 1, 0, 0, 2], [2, 0, -1, -1, 1], [2, 0, 2, 0, 1])
    torch.testing.assert_close(one.kept[3], torch.full((2, 32), whole), rtol=1e-4, atol=0)
    assert pool.step.item() == 4
    pool.stop()
