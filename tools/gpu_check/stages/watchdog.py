"""A context that dies while a step waits for the host: there is an error in time, and the next process works."""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from umbra.ops.bridge.calls import BridgeError
from umbra.tools.gpu_check.device import is_fake, opened, torch_gpu
from umbra.tools.gpu_check.stages.bridge import Chain
from umbra.tools.npu_check.outcome import Check, Passed

LIMIT_S = 5.0
NEXT = "from umbra.ops.cuda.driver import Driver; d = Driver(); d.open(); s = d.stream(); " + (
    "d.cuMemsetD32Async(d.allocate(4), 1, 1, s); d.cuStreamSynchronize(s); print('works')"
)


def checks() -> list[Check]:
    return [Check("dead context", dead), Check("next process", next_process)]


def killer() -> Callable[[], object]:
    """A function that ends the context, by a kernel that reads where it must not. Its kernels are loaded: loading one
    would wait for the work under way."""
    if is_fake():
        return partial(opened().library.fake_cuda_kill, 700)
    torch_gpu()
    import torch

    rows, index = torch.zeros(8, device="cuda"), torch.full((1,), 1 << 40, device="cuda")
    rows[torch.zeros_like(index)].cpu()
    return lambda: rows[index]


def dead() -> Passed:
    kill, chain = killer(), Chain(True, LIMIT_S)
    chain.worker.gate.clear()
    chain.bridge.begin(3)
    chain.enqueue()
    chain.driver.cuEventRecord(chain.end, chain.main)
    kill()
    begun = time.monotonic()
    try:
        chain.bridge.happened(chain.end, int(2000 * LIMIT_S))
    except (BridgeError, RuntimeError) as error:
        text = str(error)
    else:
        raise RuntimeError("a dead context raised no error")
    took = time.monotonic() - begun
    chain.worker.gate.set()
    freed = chain.bridge.close(1.0)
    if freed:
        raise RuntimeError("the bridge of a dead context was freed")
    return Passed(text, {"seconds": round(took, 3)})


def next_process() -> Passed:
    if is_fake():
        return Passed("the fake dies with its process")
    done = subprocess.run([sys.executable, "-c", NEXT], capture_output=True, text=True, timeout=30, check=False)
    if done.stdout.strip() != "works":
        raise RuntimeError(f"the next process failed: {done.stderr[-300:]}")
    return Passed("works")
