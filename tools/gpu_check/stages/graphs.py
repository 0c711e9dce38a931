"""A model's decode step in a captured graph: 2,000 replays with changed inputs, against the step op by op."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from umbra.executor.config.load import load_case
from umbra.executor.model_runner import make_runner
from umbra.executor.plan.resolve import resolve
from umbra.models.batch import Batch
from umbra.tools.gpu_check.stages.demos import ONE_RANK
from umbra.tools.npu_check.outcome import Check, Passed, Skipped

REPLAYS = 2000
EVERY = 20  # of the replays, one is compared with the step op by op


def checks() -> list[Check]:
    return [Check(f"{case}, {rows} rows", partial(replays, case, rows)) for case in ("demo",) for rows in (1, 4)]


def replays(name: str, rows: int) -> Passed:
    """Feeds the step with random tokens at the positions of one long sequence each. Both write the same keys."""
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    settings = ["exe_mode=graph", "dtype=bfloat16", f"batch_size={rows}", "input_max_len=64", "max_new_tokens=64"]
    case = resolve(load_case(name, ['platform="cuda"', *settings]), silent=True)
    runner = make_runner(case, Path("results/gpu_check"), ONE_RANK)
    runner.setup()
    engine, ops = runner.engine, runner.engine.platform.ops
    step, page = engine.decode_step, engine.packer.pool.page_size
    width, vocabulary = engine.packer.table_width, runner.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    pages = torch.arange(rows * width).view(rows, width) % engine.packer.pool.padding

    def batch(number: int) -> Batch:
        from array import array

        position = number % (width * page - 2)
        slots = array("q", (int(pages[row, position // page]) * page + position % page for row in range(rows)))
        starts, lengths = array("q", range(rows + 1)), array("q", [position + 1] * rows)
        paged = ops.paging(slots, pages.clone(), starts, lengths, page)
        ids = torch.randint(vocabulary, (rows,), generator=generator)
        return Batch(ids, torch.full((rows,), position), (paged,), None, None)

    worst, memory, begun = 0.0, 0, 0.0
    with torch.inference_mode():
        for number in range(REPLAYS):
            one = batch(number)
            ours: Any = step(one)
            if number == 1:
                torch.cuda.synchronize()
                memory, begun = torch.cuda.memory_reserved(), time.perf_counter()
            if number % EVERY == 0:
                wanted = engine.eager_step(one)
                worst = max(worst, float((ours - wanted).abs().max() / wanted.abs().max()))
                if not worst < 2e-2:
                    raise AssertionError(f"replay {number} is off by {worst:.1e}")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    grown = torch.cuda.memory_reserved() - memory
    if grown > 1 << 26:
        raise AssertionError(f"{grown} bytes of memory were taken by replays")
    return Passed(f"{REPLAYS} replays", {"worst": worst, "s": round(seconds, 2), "bytes grown": grown})
