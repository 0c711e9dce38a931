"""Experts that become resident within replays: a side stream copies an expert to a slot and then writes its place,
while a captured step reads places and slots. An expert that is seen must be whole, and stays seen until it leaves
between steps.

An expert's memory is its number, everywhere, so any other value shows a copy that was not complete."""

import random
from functools import partial
from typing import TYPE_CHECKING

from umbra.ops.cuda.bridge import GpuBridge
from umbra.ops.cuda.host_memory import RegisteredRange
from umbra.tools.gpu_check.device import opened, torch_gpu
from umbra.tools.gpu_check.stages.link import Anonymous
from umbra.tools.npu_check.outcome import Check, Passed

if TYPE_CHECKING:
    from torch import Tensor

LAYERS, EXPERTS, SLOTS, WORDS, AT_ONCE, STEPS = 24, 16, 8, 1 << 18, 2, 1000
LIMIT_S = 10.0


def checks() -> list[Check]:
    return [Check("within replays", partial(move, True)), Check("between replays", partial(move, False))]


def move(within: bool) -> Passed:
    torch_gpu()
    import torch

    driver, draw = opened(), random.Random(1)
    bridge = GpuBridge(0, 0, LIMIT_S, False)
    size = 4 * WORDS
    memory = Anonymous(EXPERTS * size, huge=True)
    store = torch.frombuffer(memory.map, dtype=torch.int32).view(EXPERTS, WORDS)
    store.copy_(torch.arange(EXPERTS, dtype=torch.int32)[:, None].expand(-1, WORDS))
    registered = RegisteredRange(memory.address, EXPERTS * size, "moves")
    slots = torch.full((SLOTS, WORDS), -7, dtype=torch.int32, device="cuda")
    places = torch.full((EXPERTS,), -1, device="cuda")
    on_host = torch.full((EXPERTS,), -1).pin_memory()
    seen = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    numbers = torch.arange(EXPERTS, device="cuda")

    def step() -> None:
        for layer in range(LAYERS):
            here = places.clone()
            rows: Tensor = slots[here.clamp(min=0)]
            torn = (rows.amin(1) != numbers) | (rows.amax(1) != numbers)
            wrong.add_((torn & (here >= 0)).sum())
            seen[layer].copy_(here)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    settled, copied = torch.cuda.Event(), torch.cuda.Event()
    resident: dict[int, int] = {}  # expert -> slot
    moves = amid = 0
    for _ in range(STEPS):
        for expert in draw.sample(sorted(resident), max(0, AT_ONCE - (SLOTS - len(resident)))):
            on_host[expert] = -1
            del resident[expert]
        places.copy_(on_host, non_blocking=True)
        settled.record()
        free = [slot for slot in range(SLOTS) if slot not in resident.values()]
        arriving = dict(zip(draw.sample([e for e in range(EXPERTS) if e not in resident], AT_ONCE), free, strict=False))
        graph.replay()
        with torch.cuda.stream(side):
            settled.wait()
            for expert, slot in arriving.items():
                driver.cuMemcpyAsync(slots[slot].data_ptr(), store[expert].data_ptr(), size, side.cuda_stream)
                if within:
                    bridge.write(side.cuda_stream, places[expert].data_ptr(), slot)
            copied.record()
        main.synchronize()
        copied.synchronize()
        moves += len(arriving)
        views = seen.cpu()
        for expert, slot in arriving.items():
            column = views[:, expert]
            if not bool(((column[1:] >= column[:-1]) & (column[1:] <= slot)).all()):
                raise RuntimeError(f"expert {expert} was seen and then not: {column.tolist()}")
            amid += int(column[0] < 0 <= column[-1])
            on_host[expert] = resident[expert] = slot
        if count := int(wrong.item()):
            raise RuntimeError(f"{count} experts were seen before their copies were complete")
    registered.end()
    bridge.close(LIMIT_S)
    return Passed(f"{moves} moves, {amid} of them seen within a replay", {"moves": moves, "within": amid})
