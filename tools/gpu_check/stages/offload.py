"""Experts in the host's memory: the demo's tokens at every share of residents, and bits under random placements.

Exact experts give the same bits wherever they are computed: rows have one element, gates are 0 or at least 128, whose
silu is exact, and all sums are small whole numbers."""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from umbra.executor.config.load import load_case
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.executor.plan.resolve import resolve
from umbra.executor.platform.cuda.shadow_device import CudaDevice
from umbra.executor.run.prompts import encode_prompts
from umbra.models.tokenizers import open_tokenizer
from umbra.ops.cpu.engine import shadow_teams, start
from umbra.ops.cpu.shadow import ShadowPool
from umbra.ops.cuda.ops import CudaOps
from umbra.ops.formats import FORMATS
from umbra.ops.interface import SILU_EXPERTS
from umbra.tools.gpu_check.device import torch_gpu
from umbra.tools.gpu_check.stages.demos import ONE_RANK, SETTINGS, completions
from umbra.tools.npu_check.outcome import Check, Passed

LAYERS, EXPERTS, SLOTS, TOP_K, INNER, HIDDEN, ROWS = 4, 16, 24, 4, 64, 128, 4
MOVES, AT_ONCE, INPUTS, LIMIT_S = 5000, 2, 8, 5.0


def checks() -> list[Check]:
    return [
        Check("demo, none resident", partial(tokens, {"mode": "fixed", "slots": -1})),
        Check("demo, half resident", partial(tokens, {"mode": "fixed", "share": 50, "max_swaps": 8, "interval": 1})),
        Check("demo, all resident", partial(tokens, {"mode": "resident"})),
        Check("demo, elastic", partial(tokens, {"mode": "elastic", "max_swaps": 8, "interval": 2})),
        Check("bits, moves within replays", partial(bits, True)),
        Check("bits, moves between replays", partial(bits, False)),
    ]


def offloaded(name: str, offload: dict[str, Any], settings: dict[str, Any]) -> ModelRunner:
    """The runner of a case with shadow experts; `share` of `offload` is the share of experts that are resident in %."""
    keys = ['platform="cuda"', "exe_mode=graph", *(f"{key}={value}" for key, value in settings.items())]
    if (share := offload.pop("share", None)) is not None:
        config = make_runner(resolve(load_case(name, keys), silent=True), Path("results/gpu_check"), ONE_RANK).config
        offload["slots"] = config.num_hidden_layers * config.expert_count * share // 100 or -1
    keys += [f"offload_config.{key}={value}" for key, value in ({"measure_s": 0.3} | offload).items()]
    runner = make_runner(resolve(load_case(name, keys), silent=True), Path("results/gpu_check"), ONE_RANK)
    runner.setup()
    return runner


def tokens(offload: dict[str, Any]) -> Passed:
    torch_gpu()
    settings = SETTINGS | {"quantization.method": "none"}
    wanted, _ = completions("demo", "cpu", "eager", (("quantization.method", "none"),))
    runner = offloaded("demo", dict(offload), settings)
    tokenizer = open_tokenizer(runner.folder, True, runner.config.vocab_size, runner.case.model_config.chat_template)
    if tokenizer is None:
        raise AssertionError("the demo has no tokenizer")
    prompts = list(zip(runner.case.data_config.prompts, encode_prompts(runner.case, tokenizer), strict=True))
    begun = time.perf_counter()
    generated = [list(sequence.generated) for sequence in runner.model_generate(prompts)]
    seconds = time.perf_counter() - begun
    shadows = runner.engine.shadows
    if shadows is None:
        raise AssertionError("the case has no shadow experts")
    measured = {
        "s": round(seconds, 2),
        "resident": int(shadows.published.sum()),
        "experts": int(shadows.published.size),
        "copies": len(shadows.history.copies),
    }
    for ours, theirs in zip(generated, wanted, strict=True):
        if ours != theirs:
            same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            raise AssertionError(f"token {same} of {len(theirs)} differs, {measured}")
    return Passed(f"{sum(map(len, generated))} tokens", measured)


def exact(which: str, draw: torch.Generator) -> torch.Tensor:
    """A matrix of an exact expert."""
    rows, columns = (HIDDEN, INNER) if which == "down" else (INNER, HIDDEN)
    if which == "gate":
        return 128.0 * torch.randint(2, (rows, columns), generator=draw)
    whole = torch.randint(-1, 2, (rows, columns), generator=draw).float()
    return whole / 128 if which == "down" else whole


def bits(within: bool) -> Passed:
    """Moves experts at random while steps run; each step's outputs must equal those of the first placement."""
    torch_gpu()
    start(2, "auto", shadow=2)
    draw, numbers = random.Random(1), torch.Generator().manual_seed(1)
    ops, gpu = CudaOps(torch.float32, True, ROWS), torch.device("cuda")
    device, pool = CudaDevice(ops, gpu, TOP_K, ROWS, LIMIT_S), ShadowPool(shadow_teams(2), LIMIT_S)
    layers = [
        device.experts(pool, number, slice(0, EXPERTS), INNER, HIDDEN, FORMATS["float32"], SILU_EXPERTS)
        for number in range(LAYERS)
    ]
    for layer in layers:
        for expert in range(EXPERTS):
            for which in ("gate", "up", "down"):
                layer.fill(expert, which, exact(which, numbers))
    memory = torch.zeros(SLOTS * layers[0].slot_bytes, dtype=torch.uint8, device=gpu)
    device.open(memory, memory.nbytes, lambda layer: None)
    inputs = torch.zeros(INPUTS, ROWS, HIDDEN)
    inputs.scatter_(2, torch.randint(HIDDEN, (INPUTS, ROWS, 1), generator=numbers), 1.0)
    ids = torch.rand(INPUTS, LAYERS, ROWS, EXPERTS, generator=numbers).argsort(-1)[..., :TOP_K].contiguous()
    weights = 2.0 ** -torch.randint(3, (INPUTS, LAYERS, ROWS, TOP_K), generator=numbers)
    on_gpu = [tensor.to(gpu) for tensor in (inputs, ids, weights)]
    x, routed, weighted = (tensor[0].clone() for tensor in on_gpu)

    def step() -> torch.Tensor:
        return torch.stack([layer.mixture(x, weighted[n], routed[n], None) for n, layer in enumerate(layers)])

    def begin(number: int) -> None:
        for to, source in zip((x, routed, weighted), on_gpu, strict=True):
            to.copy_(source[number % INPUTS])
        device.begin(int(pool.count_step()), [ROWS], [ROWS])

    wanted = []
    for number in range(INPUTS):
        begin(number)
        result = step()
        device.finish()
        wanted.append(result.clone())
    if not all(bool(result.abs().sum() > 0) for result in wanted):
        raise AssertionError("the exact experts give nothing")
    begin(0)
    device.finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    resident: dict[tuple[int, int], int] = {}
    everyone = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    moves = steps = 0
    while moves < MOVES:
        for id in draw.sample(sorted(resident), max(0, AT_ONCE - (SLOTS - len(resident)))):
            device.withdraw(id)
            del resident[id]
        free = [slot for slot in range(SLOTS) if slot not in resident.values()]
        coming = dict(zip(draw.sample([id for id in everyone if id not in resident], AT_ONCE), free, strict=False))
        starts = {id: slot * layers[0].slot_bytes for id, slot in coming.items()}
        if not within:
            for ticket in [device.copy(id, offset) for id, offset in starts.items()]:
                device.wait(ticket)
            for id, offset in starts.items():
                device.publish(id, offset)
        begin(steps)
        settled = torch.cuda.Event()
        settled.record()
        graph.replay()
        if within:
            device.copies.stream.wait_event(settled)  # the table precedes the places that are written to it
            tickets = [device.copy(id, offset) for id, offset in starts.items()]
        device.finish()
        if not torch.equal(captured, wanted[steps % INPUTS]):
            difference = (captured - wanted[steps % INPUTS]).abs().flatten(1).amax(1).tolist()
            raise AssertionError(f"step {steps}, after {moves} moves: layers differ by {difference}")
        if within:
            for ticket in tickets:
                device.wait(ticket)
            for id, offset in starts.items():
                device.publish(id, offset)
        resident |= coming
        moves, steps = moves + len(coming), steps + 1
    hits, routed_count = sum(int(layer.layer.hits) for layer in layers), steps * LAYERS * ROWS * TOP_K
    device.close()
    pool.stop()
    return Passed(f"{moves} moves in {steps} steps", {"moves": moves, "hits %": round(100 * hits / routed_count, 1)})
