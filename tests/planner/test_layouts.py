"""A layout of a cluster: the case of a replica, what fits, and what steps and prefills are made of."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from cpu_offload.memory.arena import LOST, extent_of
from executor.config.units import GB
from planner.cluster import Load
from planner.layouts import Layout, Sizes, case_of, make_layout
from planner.simulation.run import Simulator
from planner.times import step_times
from tests.planner.test_cluster import CLUSTER, HARDWARE
from umbra.errors import UserError

SIZES = Sizes(2, 4, 2, 4, "none", 1.0)
OVER_HOSTS = dataclasses.replace(HARDWARE, device=dataclasses.replace(HARDWARE.device, reserved_gb=2.0))


@pytest.fixture(scope="module")
def layout() -> Layout:
    return make_layout(CLUSTER, SIZES, OVER_HOSTS)


def test_the_case_of_a_replica_has_room_for_its_traffic() -> None:
    case = case_of(CLUSTER, SIZES)
    load, data = CLUSTER.load, case.data_config
    assert (
        data.input_max_len + data.max_new_tokens == case.max_sequence_length == load.prompt_tokens + load.output_tokens
    )
    assert data.max_new_tokens == 1
    assert case.offload_config.mode == "none"
    assert data.batch_size == SIZES.attn_dp * CLUSTER.search.most_sequences
    assert data.chunked_prefill_size == CLUSTER.search.chunk
    assert (case.world_size, case.parallel_sizes.attn_tp, case.parallel_sizes.moe_tp) == (4, 2, 4)
    assert case.hccl_config.aiv_group == "none"
    assert (
        case_of(dataclasses.replace(CLUSTER, case="qwen3_30b_a3b_q4_cpu"), Sizes(1, 2, 2, 2, "q4", 1.0)).platform
        == "cpu"
    )


def test_memory_of_a_layout(layout: Layout) -> None:
    memory, load = layout.counted.memory, CLUSTER.load
    assert layout.all_free_bytes == 62 * GB - memory.rest
    assert layout.free_bytes == layout.all_free_bytes - memory.experts
    assert layout.host_bytes == 0.0
    assert layout.most_sequences == CLUSTER.search.most_sequences
    half = Layout(CLUSTER, dataclasses.replace(SIZES, resident=0.5), OVER_HOSTS, layout.counted)
    assert half.free_bytes == half.all_free_bytes - memory.experts / 2
    assert (layout.placing.sharing, half.placing.sharing) == (1, 8)
    assert half.host_bytes == 8 * memory.experts
    few = Layout(dataclasses.replace(CLUSTER, devices=3), half.sizes, OVER_HOSTS, layout.counted)
    assert few.placing.sharing == 3
    each = memory.token * (load.prompt_tokens + load.output_tokens)
    for room, fit in ((3.5, 3), (3.0, 3), (0.9, 0)):
        needed = (memory.rest + memory.experts + room * each) / GB
        device = dataclasses.replace(HARDWARE.device, memory_gb=needed + 1e-9)
        tight = dataclasses.replace(HARDWARE, device=device)
        assert Layout(CLUSTER, SIZES, tight, layout.counted).most_sequences == fit
        if not fit:
            with pytest.raises(UserError, match=r"does not fit: 0\.0 GB of a device's memory are missing"):
                make_layout(CLUSTER, SIZES, tight)


def test_what_a_host_holds_must_fit(layout: Layout) -> None:
    half = dataclasses.replace(SIZES, resident=0.5)
    needed = 8 * layout.counted.memory.experts / GB
    for room, right in ((needed + 1e-6, True), (needed - 1e-6, False)):
        hardware = dataclasses.replace(HARDWARE, host=dataclasses.replace(HARDWARE.host, memory_gb=room))
        if right:
            assert make_layout(CLUSTER, half, hardware).host_bytes == pytest.approx(needed * GB)
        else:
            with pytest.raises(UserError, match=f"a host holds {needed:.0f} GB of experts in {room:.0f} GB"):
                make_layout(CLUSTER, half, hardware)


def test_steps_see_half_of_the_answers_and_prefills_come_in_chunks(layout: Layout) -> None:
    counted, placing = layout.counted, layout.placing
    load = CLUSTER.load
    assert layout.decode(3) == step_times(counted.decode(3, load.prompt_tokens + 64), placing, OVER_HOSTS)
    assert layout.decode(3) is layout.decode(3)
    search = dataclasses.replace(CLUSTER.search, chunk=200)
    chunked = Layout(dataclasses.replace(CLUSTER, search=search), SIZES, OVER_HOSTS, counted)
    parts = [
        step_times(counted.prefill(tokens, cached), placing, OVER_HOSTS).total
        for tokens, cached in ((200, 0), (200, 200), (112, 400))
    ]
    assert chunked.prefill.total == pytest.approx(sum(parts))
    short = dataclasses.replace(CLUSTER, load=Load(rate=1.0, prompt_tokens=200, output_tokens=1), search=search)
    assert Layout(short, SIZES, OVER_HOSTS, counted).prefill.total == pytest.approx(parts[0])


@pytest.mark.parametrize(
    ("world", "node", "lost"),
    [
        (4, 0, [0, 1]),
        (4, 1, [2, 3]),
        (16, 0, [0]),
        (16, 1, [0]),
        (8, 1, [1]),
        (12, 0, [0]),
        (12, 1, [0, 1]),
        (2, 2, [8, 9, 10, 11]),
    ],
)
def test_a_node_that_fails_takes_the_replicas_with_ranks_on_it(world: int, node: int, lost: list[int]) -> None:
    """Of nodes with eight devices."""
    run: Any = Simulator.__new__(Simulator)
    run.layout = SimpleNamespace(sizes=SimpleNamespace(world=world), hardware=HARDWARE)
    run.simulation = SimpleNamespace(node_restart_s=60.0)
    run.outcome = SimpleNamespace(replicas=list(range(48 // world)))
    failed: list[Any] = []
    run._fail = lambda replica, now, seconds: failed.append((replica, now, seconds))
    run._plan_loss = lambda *given: failed.append(given)
    run._lose_node(node, 5.0)
    assert failed == [*((replica, 5.0, 60.0) for replica in lost), (node, 65.0)]


def test_extents_lose_little() -> None:
    for frame in (7, 10, 64, 100):
        for slot in range(1, 160):
            fewest = next(n for n in range(1, 200) if n * frame >= slot)
            lost = {n: n * frame % slot / (n * frame) for n in range(fewest, fewest + LOST)}
            right = [n for n in lost if lost[n] <= 1 / LOST + 1e-12] or [min(lost, key=lambda n: lost[n])]
            assert extent_of(frame, slot) == (right[0], right[0] * frame // slot)
