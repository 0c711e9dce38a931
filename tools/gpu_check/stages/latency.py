"""Microseconds that a job of the host adds to a layer of a captured step, in which the GPU computes nothing else."""

import ctypes
import functools
import statistics
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from umbra.base.files import ROOT
from umbra.ops.bridge import calls
from umbra.ops.bridge.calls import BridgeJob
from umbra.ops.cpu.shadow import BridgeWorker
from umbra.ops.cuda.bridge import GpuBridge
from umbra.tools.gpu_check.device import is_fake, opened, torch_gpu
from umbra.tools.npu_check.outcome import Check, Passed

LAYERS, HIDDEN, TOP_K, EXPERTS, REPLAYS = 48, 2048, 8, 128, 100
LIMIT_S = 10.0
BUSY_US = 200
SOURCE, BUILT = ROOT / "tools/gpu_check/echo.cpp", ROOT / "build/gpu_check_echo.so"


def checks() -> list[Check]:
    by_driver = [
        Check(f"{way} and copies, {rows} rows", partial(copied, doorbell, rows))
        for rows in (1, 8)
        for doorbell, way in ((False, "host function"), (True, "doorbell"))
    ]
    return by_driver + [Check(f"a layer's job, {rows} rows", partial(measure, rows)) for rows in (1, 8)]


@functools.cache
def echo() -> ctypes.CDLL:
    library = ctypes.CDLL(str(calls.build(SOURCE, Path(BUILT))))
    library.umbra_echo_begin.argtypes = (ctypes.c_long,)
    return library


def copied(doorbell: bool, rows: int) -> Passed:
    """By the driver alone: a copy to the host, a job, and a copy back, in each layer."""
    driver, size = opened(), 2 * rows * HIDDEN
    submit = ctypes.cast(echo().umbra_echo_now, ctypes.c_void_p).value or 0
    bridge = GpuBridge(submit, 0, LIMIT_S, doorbell)
    main, side, fork, back = driver.stream(), driver.stream(), driver.event(), driver.event()
    begin, end = (driver.event(timing=True) for _ in range(2))
    there = driver.allocate(size)
    payloads: list[tuple[int, int, int]] = []
    for layer in range(LAYERS):
        x, sums = driver.pinned(size), driver.pinned(size)
        job = BridgeJob(x, 0, 0, 0, sums, rows, 1, HIDDEN, layer, -1, None)
        payloads.append((x, sums, bridge.payload(job, size)))
    with driver.captured(main) as graph:
        for x, sums, payload in payloads:
            if doorbell:
                driver.cuMemcpyAsync(x, there, size, main)
                bridge.launch(main, payload)
                bridge.wait_for_answer(main)
            else:
                driver.cuEventRecord(fork, main)
                driver.cuStreamWaitEvent(side, fork, 0)
                driver.cuMemcpyAsync(x, there, size, side)
                bridge.launch(side, payload)
                driver.cuEventRecord(back, side)
                driver.cuStreamWaitEvent(main, back, 0)
            driver.cuMemcpyAsync(there, sums, size, main)
    times = []
    for step in range(3 if is_fake() else REPLAYS):
        bridge.begin(step)
        driver.cuEventRecord(begin, main)
        graph.launch(main)
        driver.cuEventRecord(end, main)
        if not bridge.happened(end, int(2000 * LIMIT_S)):
            raise RuntimeError("the stream did not end")
        bridge.check()
        times.append(1e3 * driver.elapsed_ms(begin, end) / LAYERS)
    bridge.close(LIMIT_S)
    us = round(statistics.median(times), 2)
    return Passed(f"{us} us a layer", {"us a layer": us, "least": round(min(times), 2), "most": round(max(times), 2)})


def measure(rows: int) -> Passed:
    torch_gpu()
    measured: dict[str, float] = {}
    base, _ = replay_us(None, rows)
    measured["us a layer without jobs"] = round(base / LAYERS, 2)
    for name, function, busy in (("at once", "now", 0), ("by a thread", "later", 0), ("busy", "later", BUSY_US)):
        if function == "later":
            echo().umbra_echo_begin(1000 * busy)
        on_gpu, wall = replay_us(f"umbra_echo_{function}", rows)
        if function == "later":
            echo().umbra_echo_end()
        measured[f"us a layer, worker {name}"] = round((on_gpu - base) / LAYERS - busy, 2)
        measured[f"us a step from the host, worker {name}"] = round(wall, 1)
    return Passed(f"{measured['us a layer, worker by a thread']} us a layer", measured)


def replay_us(function: str | None, rows: int) -> tuple[float, float]:
    """Times of a replay by the GPU's events and by the host's clock; checks the values of each replay."""
    import torch

    from umbra.ops.cuda.shadow import GpuNodes

    torch.manual_seed(0)
    x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    own = torch.randint(-2, 3, (rows, HIDDEN), device="cuda").bfloat16()
    ids = torch.randint(EXPERTS, (rows, TOP_K), device="cuda")
    weights = torch.rand(rows, TOP_K, device="cuda")
    places = torch.full((EXPERTS,), -1, device="cuda")
    nodes = None
    if function:
        submit = ctypes.cast(getattr(echo(), function), ctypes.c_void_p).value or 0
        worker = cast(BridgeWorker, SimpleNamespace(submit=submit, context=0))
        nodes = GpuNodes(worker, range(LAYERS), EXPERTS, HIDDEN, TOP_K, x.dtype, rows, LIMIT_S)
        nodes.prepare(rows)

    def step() -> torch.Tensor:
        value = x
        for layer in range(LAYERS):
            if nodes:
                nodes.submit(value, ids, weights, places, layer)
                value = nodes.join(own, layer)
            else:
                value = own + value
        return value

    if nodes:
        nodes.begin(0, rows)
    step()
    nodes.finish() if nodes else torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    on_gpu, wall = [], []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(REPLAYS):
        x.fill_(number % 5)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        if nodes:
            nodes.begin(1 + number, rows)
        begin.record()
        graph.replay()
        end.record()
        nodes.finish() if nodes else end.synchronize()
        wall.append(1e6 * (time.perf_counter() - begun))
        end.synchronize()
        on_gpu.append(1e3 * begin.elapsed_time(end))
        if not torch.equal(result, own * LAYERS + x):
            raise RuntimeError(f"replay {number} differs by {(result - own * LAYERS - x).abs().max().item()}")
    if nodes:
        nodes.close()
    return statistics.median(on_gpu), statistics.median(wall)
