"""Stage 10: the demo model on Ascend, on one rank and on several, against the engine of the CPU. Stages 5 and 9 run it
in other modes."""

import functools
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from umbra.commands.logits import with_room
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import load_model_config, model_folder
from umbra.executor.engine.step.teacher_forcing import ForcedRun
from umbra.executor.model_runner import make_runner
from umbra.executor.platform.ascend.fallbacks import ABOUT_STRICT
from umbra.executor.run.prompts import encode_prompts
from umbra.models.tokenizers import open_tokenizer
from umbra.tools.npu_check import ranks
from umbra.tools.npu_check.environment import ascend_overrides, case_environment, demo_case
from umbra.tools.npu_check.numbers import Differs
from umbra.tools.npu_check.outcome import Check, Passed, Skipped

STEPS = 16
TOLERANCE = 0.02  # of a token's logits in bfloat16 against the CPU's, relative to their norm
FAR, MOST_FAR = 0.1, 0.1  # where rounding chooses another expert, errors are larger: share of tokens that may have them
NEAR = 0.05  # a near tie: two logits that differ by less than this share of the largest
WIDE = 8  # ranks of the second case
ON_CPU = ["exe_mode=eager", "quantization.method=none", "threads=2"]
Logits = dict[str, np.ndarray]


def checks(logs: Path) -> list[Check]:
    return [
        Check("1 rank, npugraph_ex", partial(against_cpu, logs, 1, ())),
        Check(f"{WIDE} ranks, ge_graph", partial(against_cpu, logs, WIDE, ("exe_mode=ge_graph", "moe_tp_size=2"))),
    ]


def against_cpu(logs: Path, size: int, overrides: tuple[str, ...]) -> Passed:
    require_dies(size)
    expected = on_cpu(logs)
    ours, measured = logits_of(ascend_overrides(f"world_size={size}", *overrides), logs / f"model{size}", expected)
    return Passed(f"{compare(ours, expected, TOLERANCE)}; {summary(measured)}", measured)


@functools.cache
def on_cpu(logs: Path) -> Logits:
    return logits_of(ON_CPU, logs / "cpu")[0]


def require_dies(count: int) -> None:
    import torch_npu

    devices = torch_npu.npu.device_count()
    if devices < count:
        raise Skipped(f"needs {count} dies, this machine has {devices}")


def summary(measured: dict[str, Any]) -> str:
    return f"{measured['step_ms']:.2f} ms a step, {measured['tokens_per_s']:.0f} tokens/s"


def logits_of(overrides: list[str], logs: Path, forced: Logits | None = None) -> tuple[Logits, dict[str, Any]]:
    """The logits of the demo's prompts and of STEPS tokens after each, chosen greedily or those of `forced`; and rank
    0's times. The ranks of the case are started for it."""
    case = demo_case(overrides)
    tokens = None if forced is None else [forced[f"ids_{i}"].tolist() for i in range(len(case.data_config.prompts))]
    logs.mkdir(parents=True, exist_ok=True)
    out = logs / "logits.npz"
    given = {"overrides": overrides, "out": str(out), "steps": STEPS, "tokens": tokens}
    function = "umbra.tools.npu_check.stages.model:rank_logits"
    measured = ranks.run(function, case.world_size, case_environment(case, os.environ), logs, given)[0]
    for line in (logs / "rank0.log").read_text(errors="replace").splitlines():
        if ABOUT_STRICT in line:
            raise RuntimeError(f"a slower way was taken: {line}")
    with np.load(out) as arrays:
        return dict(arrays), measured


def compare(ours: Logits, expected: Logits, tolerance: float) -> str:
    """Raises unless the median error of a token's logits is at most `tolerance`, few tokens are far off, and elsewhere
    the most probable token differs in near ties only. Says all three."""
    names = [name for name in expected if not name.startswith("ids")]
    mine, theirs = (np.concatenate([arrays[name] for name in names]) for arrays in (ours, expected))
    if not np.isfinite(mine).all():
        raise Differs("the logits are not finite")
    errors = np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    far, typical, rows = errors > FAR, float(np.median(errors)), np.arange(len(theirs))
    text = f"median error {typical:.2g}, {far.sum()} of {len(rows)} tokens above {FAR}"
    if typical > tolerance or far.mean() > MOST_FAR:
        raise Differs(f"the logits differ: {text}; at most {tolerance} and {MOST_FAR:.0%} may be")
    gaps = theirs.max(1) - theirs[rows, mine.argmax(1)]
    if (gaps > NEAR * np.abs(theirs).max(1))[~far].any():
        raise Differs(f"the most probable token differs where it is no near tie; {text}")
    return f"{text}, {(gaps > 0).sum()} other choices"


def rank_logits(overrides: list[str], out: str, steps: int, tokens: list[list[int]] | None) -> dict[str, Any]:
    """Computes on each rank the logits for `logits_of`; `tokens` are the prompts with the tokens that follow."""
    case = demo_case(overrides)
    tokenizer, folder = open_tokenizer(model_folder(case), True, load_model_config(case).vocab_size), Path(out).parent
    if tokenizer is None:
        raise TypeError("the demo has a tokenizer")
    prompts = encode_prompts(case, tokenizer)
    case = with_room(case, len(prompts), max(map(len, prompts)), steps + 1)
    runner = make_runner(case, folder, rank_env())
    runner.setup()
    run, rows = ForcedRun(runner.engine), [list(ids) for ids in prompts]
    prefill = run.add(prompts, steps + 1, all_logits=True)
    last, decode, seconds = prefill, [logits[:0] for logits in prefill], []
    with runner.engine.platform.watched():
        for step in range(steps):
            chosen = [
                int(logits[-1].argmax()) if tokens is None else tokens[i][len(prompts[i]) + step]
                for i, logits in enumerate(last)
            ]
            for row, token in zip(rows, chosen, strict=True):
                row.append(token)
            run.extend(chosen)
            begun = time.perf_counter()
            last = run.decode()
            seconds.append(time.perf_counter() - begun)
            decode = [torch.cat(parts) for parts in zip(decode, last, strict=True)]
    run.close()
    if rank_env().rank == 0:
        arrays = {f"prefill_{i}": t.float().numpy() for i, t in enumerate(prefill)}
        arrays |= {f"decode_{i}": t.float().numpy() for i, t in enumerate(decode)}
        np.savez(out, **arrays, **{f"ids_{i}": np.array(row) for i, row in enumerate(rows)})  # type: ignore[arg-type]
    step_s = statistics.median(seconds[1:] or seconds)  # the first one captures
    missed = int(runner.engine.shadows.history.steps[-1].misses.sum()) if runner.engine.shadows else 0
    return {"step_ms": 1e3 * step_s, "tokens_per_s": len(prompts) / step_s, "missed": missed}
