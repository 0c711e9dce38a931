"""Decode and prefill of 8 layers of Qwen3-30B-A3B's shapes with random weights, at several shares of resident experts:
rates, the planner's predictions, and how much of the shorter side the longer one hides."""

import functools
import statistics
import time
from functools import partial
from typing import Any

import torch

from umbra.executor.model_runner import ModelRunner
from umbra.executor.platform.cuda.shadow_device import CudaDevice
from umbra.ops.cpu.engine import cores_of
from umbra.tools.gpu_check.device import torch_gpu
from umbra.tools.gpu_check.stages.offload import offloaded
from umbra.tools.npu_check.outcome import Check, Passed

CASE = "bench_30b_shape_cpu"
SHARES, BATCHES, DECODED, PREFILLS = (100, 50, 25, 0), (1, 4, 8), 40, (512, 2048)
WARM = 8  # decode steps that are not counted
SETTINGS = {"batch_size": max(BATCHES), "input_max_len": max(PREFILLS), "chunked_prefill_size": max(PREFILLS)}


def checks() -> list[Check]:
    """Shares only fall, so that experts of one model, which is filled once, are evicted and none is loaded."""
    cases = [Check("model", model)]
    for share in SHARES:
        cases += [
            Check(f"decode, {share}% resident, batch {batch}", partial(decode, share, batch)) for batch in BATCHES
        ]
        cases += [Check(f"prefill {n}, {share}% resident", partial(prefill, share, n)) for n in PREFILLS]
    return [*cases, Check("overlap", overlap)]


@functools.cache
def opened() -> ModelRunner:
    """The model with all experts resident. The planner, which would choose for that share alone, gets all cores but
    those of the thread that polls the doorbell and of Python, and streams experts of every prompt."""
    torch_gpu()
    offload: dict[str, Any] = {"mode": "fixed", "share": 100, "max_swaps": -1}
    offload |= {"shadow_threads": max(1, cores_of() - 2), "stream_tokens": max(BATCHES) + 1}
    return offloaded(CASE, offload, SETTINGS | {"max_new_tokens": DECODED})


def random_prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = torch.randint(
        opened().config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return ids


def model() -> Passed:
    runner = opened()
    measured = {}
    if runner.planned:
        measured["planned"] = runner.planned.planner.table(max(BATCHES)) + runner.planned.choices.table()
    return Passed("filled", measured)


def keep(share: int) -> CudaDevice:
    """Evicts experts, spread over layers, until the share in % is resident."""
    shadows = opened().engine.shadows
    if shadows is None or not isinstance(shadows.device, CudaDevice):
        raise AssertionError("the case has no shadow experts")
    left = shadows.published.size * share // 100
    for id in sorted(shadows.slots, key=lambda id: (id[1], id[0]))[left:]:
        shadows.evict(id)
    return shadows.device


@functools.cache
def times_of(share: int, batch: int, shadowed: bool = True) -> dict[str, float]:
    """Medians of decode steps. Without `shadowed` the shadow pool ignores all rows, so steps wait for the GPU only."""
    runner, device = opened(), keep(share)
    prompts = [("", random_prompt(i, 32)) for i in range(batch)]
    shadows, begin = runner.engine.shadows, device.begin

    def ignoring(step: int, tokens: Any, live: Any) -> None:
        begin(step, tokens, [0] * len(live))

    with torch.inference_mode():
        device.begin = begin if shadowed else ignoring  # type: ignore[method-assign]
        if shadows is None or runner.planned is None:
            raise AssertionError("the case has no shadow experts")
        shadows.forget()  # the steps of other shares and batches
        runner.model_generate(prompts, warm_up=True)
        if shadowed:
            runner.planned.begin(shadows, runner.loop.timings.pure_decode_steps)
        shadows.forget()
        runner.model_generate(prompts)
        device.begin = begin  # type: ignore[method-assign]
    steps = shadows.history.steps[WARM:]
    if not steps:
        raise AssertionError("no decode steps were recorded")
    whole = [(step.end - step.start) / 1e6 for step in steps]
    pool = [float((step.times[:, 1] - step.times[:, 0]).sum()) / 1e6 for step in steps]
    hits, misses = (
        sum(int(part.sum()) for part in parts) for parts in ((s.hits for s in steps), (s.misses for s in steps))
    )
    return {
        "step ms": round(statistics.median(whole), 3),
        "pool ms": round(statistics.median(pool), 3),
        "step without pool ms": round(statistics.median(a - b for a, b in zip(whole, pool, strict=True)), 3),
        "tokens/s": round(1000 * batch / statistics.median(whole), 1),
        "hits %": round(100 * hits / max(1, hits + misses), 1),
    }


def decode(share: int, batch: int) -> Passed:
    measured, alone = times_of(share, batch), times_of(share, batch, False)
    measured["step ms, pool idle"] = alone["step ms"]
    if planned := opened().planned:
        measured["predicted ms"] = round(float(planned.planner.step_ms(batch, measured["hits %"] / 100)), 3)
    return Passed(f"{measured['tokens/s']} tokens/s", dict(measured))


def prefill(share: int, tokens: int) -> Passed:
    keep(share)
    runner, times = opened(), []
    with torch.inference_mode():
        for i in range(3):
            prompt = random_prompt(i, tokens)
            begun = time.perf_counter()
            runner.loop.submit(runner.request(0, prompt, 1), 0)
            while not runner.loop.idle:
                runner.loop.step()
            times.append(1e3 * (time.perf_counter() - begun))
    ms = min(times)
    return Passed(f"{1000 * tokens / ms:.0f} tokens/s", {"ms": round(ms, 1)})


def overlap() -> Passed:
    """The GPU's time for residents is what a step with an idle pool takes beyond one without residents. What a step
    takes beyond the pool's time and a step without residents is not hidden."""
    measured, least = {}, 1.0
    for share in (50, 25):
        for batch in BATCHES:
            both, idle = times_of(share, batch), times_of(share, batch, False)
            empty = times_of(0, batch, False)["step ms"]
            on_gpu, exposed = idle["step ms"] - empty, both["step without pool ms"] - empty
            shorter = max(1e-3, min(on_gpu, both["pool ms"]))
            hidden = max(0.0, 1 - max(0.0, exposed) / shorter)
            least = min(least, hidden)
            measured[f"{share}% resident, batch {batch}"] = {
                "GPU ms": round(on_gpu, 3),
                "pool ms": both["pool ms"],
                "exposed ms": round(exposed, 3),
                "hidden": round(hidden, 3),
            }
    return Passed(f"{100 * least:.0f}% of the shorter side is hidden at least", measured)
