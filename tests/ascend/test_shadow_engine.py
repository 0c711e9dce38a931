"""Cases with shadow experts on the fake device: the calls of a step, experts that move between steps, and faults."""

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ascend.clock import Rates, races, timed, touching
from tests.ascend.engine import CAPTURE_MODES, PROMPTS, ascend_case, ascend_runner, generate, prefilled, value_copies
from tests.ascend.extension import load_extension
from tests.ascend.log import device_log, violations
from tests.ascend.test_eager import ATTENTION, EXPERTS, FINALIZE, MOE, ROUTER
from tests.ascend.workers import Gate, WatchedWorker, array, close_nodes
from tests.variants import thorough_after
from umbra.base.errors import UserError
from umbra.cpu_offload.expert_ring import GROUPS
from umbra.cpu_offload.manager import ShadowExperts
from umbra.executor.model_runner import ModelRunner
from umbra.executor.plan.shadows import show_offload_plan
from umbra.executor.platform.ascend import shadow_device
from umbra.executor.platform.ascend.plan.memory import make_plan
from umbra.executor.platform.ascend.shadow_device import AscendDevice
from umbra.executor.run.memory_report import show_plan
from umbra.models.layers.base import layers_of
from umbra.ops.ascend import vector_core
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.bridge.calls import BridgeError, BridgeJob
from umbra.planner.streams import CPU

SLOT = 3 * 128 * 64 * 2  # bytes
PLACES = 8 * 4  # bytes of a layer
FORK = [
    f"memcpy async D2D {PLACES}",
    "memcpy async D2H 768",
    "memcpy async D2H 36",
    "memcpy async D2H 18",
    f"memcpy async D2H {PLACES}",
    "host function",
    "memcpy async H2D 768",
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    close_nodes()
    assert not violations()


def runner_of(folder: Path, *overrides: str, mode: str = "fixed", **sizes: Any) -> ModelRunner:
    case = ascend_case(folder, f"offload_config.mode={mode}", "strict=true", "stream_tokens=5", *overrides, **sizes)
    return ascend_runner(case, folder)


def parts(runner: ModelRunner) -> tuple[ShadowExperts, AscendDevice]:
    assert runner.engine.shadows
    assert isinstance(runner.engine.shadows.device, AscendDevice)
    return runner.engine.shadows, runner.engine.shadows.device


def step_log(runner: ModelRunner, running: list[Any]) -> list[str]:
    with device_log() as log:
        runner.loop.step()
    return log.lines


def bank(experts: int, arena: int) -> list[str]:
    """The kernels that gather a bank of `experts` from an arena of `arena` rows; experts not resident are zeros."""
    rows = experts * SLOT // 512
    return [
        f"aclnnIndexSelect ({experts})int32 ({rows})int32 ({rows})int32",
        f"aclnnAdd ({rows})int32 ({rows})int32 scalar:int64 ({rows})int32",
        f"aclnnIndexSelect ({arena},128)int32 ({rows})int32 ({rows},128)int32",
    ]


JOIN = "aclnnAdd (3,128)bfloat16 (3,128)bfloat16 scalar:int64 (3,128)bfloat16"


def untiled(line: str) -> str:
    return line.replace("WeightNz", "V5").replace(":NZ", "")


def test_a_layer(tmp_path: Path) -> None:
    """Between fork and join the main stream computes the residents and does not wait; slots hold no tiles (NZ). The
    table is looked at once."""
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5", "max_swaps=-1")
    prefilled(runner)
    with device_log() as log:
        runner.loop.step()
    lines, table = log.lines, parts(runner)[1].on_device
    start = lines.index(ROUTER[-1]) + 1
    own = ["aclnnAbs (8)int32 (8)int32", *bank(8, 1920), MOE["fusion_v2"][0], *map(untiled, EXPERTS), FINALIZE]
    expected = [*FORK, *own, JOIN, ATTENTION[-1]]
    assert lines[start : start + len(expected)] == expected
    assert touching(log.given, range(table.data_ptr(), table.data_ptr() + table.nbytes)) == 2 * FORK[:1]


@pytest.mark.parametrize(("copy", "copied"), [(0, 5 + 6), (99, 0)])
def test_a_long_prefill_copies_or_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: float, copied: int
) -> None:
    """Three of eight are resident in one layer, two in the other; an expert has two planes. A job is padded."""
    spread_evenly(monkeypatch)
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5")
    value_copies(runner, copy)
    with device_log() as log:
        prefilled(runner)
    planes = [line for line in log.lines if line in ("memcpy async H2D 32768", "memcpy async H2D 16384")]
    assert len(planes) == 2 * copied
    assert log.lines.count("host function") == (0 if copied else 2)
    assert not races(log.given)


UNIT, SCALE = 0.3e-3, SLOT / 13.37e6  # seconds; experts are so much smaller than V4-Flash's, and so are all rates


@pytest.mark.parametrize(("copy", "longest"), [(0, 0.115), (1.65, 0.06)])
def test_link_and_cpu_work_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: float, longest: float
) -> None:
    """On the fake device's clock, with a link of 27 GB/s. All that is missing is copied, then the CPU has its part."""
    spread_evenly(monkeypatch, 64)
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=32", "max_swaps=-1", num_experts=64, num_hidden_layers=4)
    ring, jobs = value_copies(runner, copy), list[float]()

    def planned(layer: int, pairs: Any, plan: Any = ring.plan) -> list[int]:
        computed: list[int] = plan(layer, pairs)
        jobs.extend([UNIT * (len(computed) + 0.1 * int(pairs[computed].sum()))] * bool(computed))
        return computed

    monkeypatch.setattr(ring, "plan", planned)
    generate(runner, [[5] * 48] * 2)  # experts are copied ahead as they were used
    jobs.clear()
    for id in range(2):
        runner.loop.submit(runner.request(id, [id] * 48, 6), id)
    with device_log() as log:
        runner.loop.step()
    trace = timed(log.given, Rates(27e9 * SCALE, 22e12 * SCALE, 5e15 * SCALE, 5e-6), jobs.__getitem__)
    assert trace.overlap > 0.9
    assert trace.seconds < longest
    assert not jobs or trace.busy(CPU) > 0.85 * trace.seconds
    assert not races(log.given)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_copy_of_a_prefill_that_fails_names_layer_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    spread_evenly(monkeypatch)
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5")
    value_copies(runner, 0)
    shadows, device = parts(runner)
    planes = device.layers[layer].planes

    def failing(expert: int) -> dict[str, torch.Tensor]:
        return {name: plane[1:] for name, plane in planes(expert).items()}

    monkeypatch.setattr(device.layers[layer], "planes", failing)
    with pytest.raises(BridgeError, match=f"layer {layer}, step {int(shadows.pool.step) + 1}: a copy of its experts"):
        prefilled(runner)
    monkeypatch.setattr(device.layers[layer], "planes", planes)
    generate(runner)


@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_residents_change_under_one_capture(tmp_path: Path, mode: str) -> None:
    """Between replays an expert's planes are copied on the side stream and then the table is updated."""
    runner = runner_of(tmp_path, f"exe_mode={mode}", "slots=5", "max_swaps=-1")
    shadows, device = parts(runner)
    running = prefilled(runner)
    first = step_log(runner, running)
    assert len([line for line in first if line == "captured host function"]) == 2
    usual = [line.split()[0] for line in step_log(runner, running)]
    here = [id for id in shadows.slots if id[0] == 0]
    for id in here:
        shadows.evict(id)
    table = f"memcpy async H2D {2 * PLACES}"
    assert step_log(runner, running)[0] == table
    node = device.nodes.nodes[4, 0]
    assert device.nodes.bridge.seen(node.payload) == int(shadows.pool.step)
    with device_log() as log:
        for id in here:
            shadows.fetch(id)
    assert log.lines == ["memcpy async H2D 32768", "memcpy async H2D 16384", "memcpy async H2D 4"] * len(here)
    assert not shadows.published[0].any()
    assert step_log(runner, running)[0] == table
    assert [line.split()[0] for line in step_log(runner, running)] == usual
    assert shadows.published[0].sum() == len(here)
    assert runner.engine.decode_step.compiles == 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModelRunner], Gate]]:
    """Gives the gate of a runner's copies of experts."""
    gates = list[Gate]()

    def gate(runner: ModelRunner) -> Gate:
        gates.append(Gate(parts(runner)[1].side.npu_stream))
        return gates[-1]

    monkeypatch.setattr(shadow_device, "BridgeWorker", WatchedWorker)
    monkeypatch.setattr(WatchedWorker, "watch", lambda _: None, raising=False)
    yield gate
    for one in gates:
        one.end()


@pytest.mark.parametrize("mode", thorough_after(1, ["eager", "acl_graph", "npugraph_ex"]))
def test_a_copy_is_used_by_the_layers_whose_turn_comes_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Callable[[ModelRunner], Gate], mode: str
) -> None:
    """It ends while the host has the first layer's job. Two of a step's pairs use expert 0; experts 1 and 2 are
    resident in the first layer, 1 in the second."""
    spread_evenly(monkeypatch)
    runner = runner_of(tmp_path, f"exe_mode={mode}", "slots=5", "max_swaps=-1")
    shadows, device = parts(runner)
    running, gate = prefilled(runner), watched(runner)
    step_log(runner, running)
    for layer in range(2):
        shadows.evict((layer, 0))
    said = list[tuple[int, bool]]()

    def watch(job: BridgeJob) -> None:
        said.append((job.layer, bool(array(job.places, ctypes.c_int32, 8)[0] >= 0)))
        if said == [(0, False)]:
            gate.open()
            while array(device.on_device.data_ptr(), ctypes.c_int32, 2, 8)[1, 0] < 0:
                time.sleep(0.001)

    def step() -> list[int]:
        said.clear()
        runner.loop.step()
        hits: list[int] = shadows.history.steps[-1].hits.tolist()
        return hits

    WatchedWorker.watch = watch
    gate.shut()
    for layer in range(2):
        shadows.fetch((layer, 0))
    assert (step(), said) == ([2, 3], [(0, False), (1, True)])
    assert shadows.published[:, 0].all()
    assert (step(), said) == ([4, 3], [(0, True), (1, True)])

    shadows.evict((0, 0))
    gate.shut()
    shadows.fetch((0, 0))
    threading.Timer(0.05, gate.open).start()
    shadows.evict((0, 0))  # waits for the copy, whose expert reaches the device's table first
    assert (step(), said) == ([2, 3], [(0, False), (1, True)])


@pytest.mark.thorough
def test_four_bits_are_read_out_of_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel finds residents through the table: no bank, no routing."""
    monkeypatch.setattr(vector_core, "built", lambda: 1)
    monkeypatch.setattr(vector_core, "load", load_extension)
    runner = runner_of(tmp_path, "exe_mode=acl_graph", "slots=5", "quantization.method=q4", "decode_gemv=on")
    lines = step_log(runner, prefilled(runner))
    start = lines.index("captured memcpy async H2D 1024") + 1
    assert lines[start].startswith("captured aclnnUmbraFusedMoeSlotsW4a16 (4,128)bfloat16 (")
    assert lines[start + 1].startswith("captured aclnnAdd (4,128)bfloat16 (4,128)bfloat16")


def spread_evenly(monkeypatch: pytest.MonkeyPatch, experts: int = 8) -> None:
    """Replaces routing by tensors with fixed addresses and values; the fake device would leave uninitialised memory."""
    weights = torch.nn.Parameter(torch.zeros(512, 3, dtype=torch.bfloat16).npu(), requires_grad=False)
    spread = torch.arange(512 * 3, dtype=torch.int32).view(512, 3) % experts
    ids = torch.nn.Parameter(spread.npu(), requires_grad=False)
    monkeypatch.setattr(AscendOps, "route_softmax", lambda _, x, *__, **___: (weights[: len(x)], ids[: len(x)]))


@pytest.mark.thorough
def test_experts_leave_for_the_cache_and_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena with room for all experts or for all pages, but not for both. No graph is captured again."""
    spread_evenly(monkeypatch)
    sizes = ("exe_mode=acl_graph", f"arena_mb={(14 * 128 + 1) / 1024}", "page_size=128", "max_new_tokens=90")
    runner = runner_of(tmp_path, *sizes, "input_max_len=150", "max_swaps=4", mode="elastic")
    shadows, _ = parts(runner)
    at_first = len(shadows.slots)
    sequences = generate(runner, [[5] * 150, [7] * 140, [9] * 100, [3] * 50])
    assert all(s.finish_reason == "length" and len(s.generated) == 90 for s in sequences)
    report = shadows.history.report()
    assert report["evictions_for_cache"] > 0
    assert report["most_kv_frames"] + min(step.expert_frames for step in shadows.history.steps) <= 14
    generate(runner, [[5]])
    assert len(shadows.slots) > at_first - report["evictions_for_cache"]
    assert runner.engine.decode_step.compiles == len(runner.engine.decode_step.graphs)


def everyone_to_expert_0(
    self: AscendOps, logits: torch.Tensor, top_k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = (torch.zeros(len(logits), top_k, dtype=dtype) for dtype in (logits.dtype, torch.int32))
    return weights.npu(), ids.npu()  # the fake device copies, but computes nothing


def test_a_stopped_pool_is_an_error_that_names_layer_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AscendOps, "route_softmax", everyone_to_expert_0)
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=-1", "timeout_s=1")
    shadows, _ = parts(runner)
    running = prefilled(runner)
    step_log(runner, running)
    times, counts = shadows.layers[1].layer.times, shadows.layers[1].layer.counts
    assert 0 < times[0] <= times[1]  # a real shadow pool computed
    assert counts.tolist() == [3 * (sum(map(len, PROMPTS)) + 3), 0, 0, 0, 0, 0, 0, 0]
    shadows.pool.stop()
    with pytest.raises(BridgeError, match=f"layer 0, step {int(shadows.pool.step) + 1}: the shadow pool failed"):
        runner.loop.step()


def test_a_stopped_pool_ends_a_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread_evenly(monkeypatch)
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5")
    value_copies(runner, 99)
    shadows, _ = parts(runner)
    shadows.pool.stop()
    with pytest.raises(BridgeError, match=f"layer 0, step {int(shadows.pool.step) + 1}: the shadow pool failed"):
        prefilled(runner)


@pytest.mark.parametrize("before", [0, 1])
def test_a_copy_that_fails_is_an_error_and_nobody_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Before a step, or within one, which gives no tokens then."""
    runner = runner_of(tmp_path, "exe_mode=eager", "slots=5", "max_swaps=-1")
    shadows, _ = parts(runner)
    running = prefilled(runner)
    step_log(runner, running)
    shadows.evict((0, 0))
    shadows.fetch((0, 0))

    calls = itertools.count()

    def failed(self: object) -> bool:
        if next(calls) < before:
            return False
        raise RuntimeError("ACL stream synchronize failed, error code:507899")

    monkeypatch.setattr(torch.npu.Event, "query", failed)
    with pytest.raises(RuntimeError, match="507899"):
        runner.loop.step()
    assert not shadows.published[0, 0]


def test_the_plan_counts_slots_in_the_devices_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = ascend_case(tmp_path, "offload_config.mode=fixed", "slots=5", "exe_mode=acl_graph")
    show_plan(case)
    said = capsys.readouterr().out
    assert f"16 with shadows, {SLOT} bytes each; 5 may be resident" in said
    assert "rest of a step    0.000 ms: not known before a run" in said
    assert "20.0 GB/s" in said  # no device to ask
    large = ascend_case(tmp_path, "offload_config.mode=elastic", "arena_mb=1200", "memory_gb=7", "exe_mode=acl_graph")
    with pytest.raises(UserError, match=r"more than ascend_config\.memory_gb: 7; .*: lower offload_config\.arena_mb"):
        show_plan(large)


def test_the_plan_is_what_a_run_allocates(tmp_path: Path) -> None:
    """The arena and its tables, and the weights outside: experts of the first layer have no shadows."""
    runner = runner_of(tmp_path, "exe_mode=eager", "arena_mb=4", "start_layer=1", mode="elastic", num_experts=128)
    for prompts in (1, 2, 4):
        generate(runner, [[5]] * prompts)
    _, device = parts(runner)
    memory, model = device.memory, runner.engine.model
    plan = make_plan(runner.case, show_offload_plan(runner.case))
    assert device.long
    assert device.long.link.count > GROUPS
    tables = [device.on_device, *device.orders.values(), *itertools.chain(*device.slots.indices.values())]
    tables += [plane for bank in device.long.link.banks for plane in bank.planes.values()]
    assert plan.of("arena") == sum(tensor.nbytes for tensor in (memory, *tables))
    tensors = [*model.parameters(), *model.buffers(), *(t for _, layer in layers_of(model) for t in layer.storages())]
    sizes = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "npu"}
    arena = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    assert plan.of("weights") == sum(size for start, size in sizes.items() if start not in arena)


def test_graphs_of_ge_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose exe_mode: acl_graph or npugraph_ex"):
        ascend_case(tmp_path, "offload_config.mode=elastic", "exe_mode=ge_graph")
