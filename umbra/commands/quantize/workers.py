"""Threads that share the work, and the progress that they make."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")
R = TypeVar("R")
PAUSE = 10.0  # seconds between two lines of progress


class ParallelMap(Protocol):
    """Calls a function with each item; the results in the order of the items, like `map`, which is one such."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


class LayerProgress:
    """Layers done: a bar if stderr is a terminal, otherwise a line every ten seconds."""

    def __init__(self, layers: int):
        self.layers, self.done = layers, 0
        self._bar = tqdm(total=layers, desc="quantizing", unit="layer", disable=None, miniters=0)
        self._began = self._said = time.monotonic()

    def tick(self) -> None:
        """Called often, while there is work."""
        self._bar.update(0)  # its clock goes on within a layer
        now = time.monotonic()
        if self._bar.disable and now - self._said >= PAUSE:
            self._said, spent = now, now - self._began
            left = f", about {spent / self.done * (self.layers - self.done):.0f} s left" if self.done else ""
            print(
                f"quantizing layer {self.done + 1} of {self.layers}: {spent:.0f} s{left}", file=sys.stderr, flush=True
            )

    def layer(self) -> None:
        """Called when a layer is done."""
        self.done += 1
        self._bar.update()

    def __enter__(self) -> "LayerProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


@contextmanager
def workers(progress: LayerProgress) -> Iterator[ParallelMap]:
    """A thread for each core. No product is split between threads and results are combined in order, so that they do
    not depend on the number of cores.

    "medium" lets PyTorch take oneDNN's products of float32, which on AMD are twice as fast as MKL's. With AVX-512 they
    are exact; with AMX they may round their factors to bfloat16, as a model does that runs in it."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    cores = len(os.sched_getaffinity(0))
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def parallel_map(function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
                waiting: deque[Future[R]] = deque()
                inferring = torch.inference_mode()(function)  # the mode is a thread's own
                try:
                    for item in items:
                        waiting.append(pool.submit(inferring, item))
                        if len(waiting) > cores:
                            yield _result(waiting.popleft(), progress)
                    while waiting:
                        yield _result(waiting.popleft(), progress)
                finally:
                    for future in waiting:
                        future.cancel()

            yield parallel_map
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _result(future: "Future[R]", progress: LayerProgress) -> R:
    result = future.result()
    progress.tick()
    return result
