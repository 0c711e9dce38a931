"""Another engine in a process of its own, so that its death is a line of a table and not the end of a benchmark."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.tools.benchmarks.peer_engine import Peer

END_S = 10.0


class PeerDied(RuntimeError):
    """The peer's process has ended; the text says how."""

    def __init__(self, name: str, how: str):
        super().__init__(f"{name}: {how}")
        self.name = name


class PeerProcess:
    """A `Peer` that `make` gives in a new process; its methods are called there. `make` must be picklable."""

    def __init__(self, name: str, make: Callable[[], Peer], cpus: set[int]):
        """Returns once the peer is loaded. `cpus`: those of its threads, since the caller may be pinned to one."""
        spawn = multiprocessing.get_context("spawn")  # a fork would have this process's threads' locks
        self.name, (self._pipe, theirs) = name, spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make, cpus), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def reserve(self, sequences: int, longest: int, at_once: int) -> None:
        self._call("reserve", sequences, longest, at_once)

    def use(self, flash: bool) -> None:
        """Only of llama.cpp."""
        self._call("use", flash)

    def begin(self, contexts: list[list[int]]) -> None:
        self._call("begin", contexts)

    def assume(self, contexts: list[list[int]]) -> None:
        self._call("assume", contexts)

    def prefill(self, prompt: list[int]) -> None:
        self._call("prefill", prompt)

    def steps(self, tokens: list[list[int]]) -> None:
        self._call("steps", tokens)

    def prefill_all(self, prompt: list[int]) -> Tensor:
        return self._logits("prefill_all", prompt)

    def step(self, tokens: list[int]) -> Tensor:
        return self._logits("step", tokens)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _call(self, method: str, *arguments: object) -> None:
        self._ask(method, arguments, False)

    def _logits(self, method: str, *arguments: object) -> Tensor:
        return torch.from_numpy(self._ask(method, arguments, True))

    def _ask(self, method: str, arguments: tuple[object, ...], wanted: bool) -> object:
        try:
            self._pipe.send((method, arguments, wanted))
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def _answer(self) -> object:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _died(self) -> PeerDied:
        self._process.join(END_S)
        status = self._process.exitcode
        if status is not None and status < 0:
            return PeerDied(self.name, f"died with {signal.Signals(-status).name}")
        return PeerDied(self.name, f"ended with status {status}")


def _serve(pipe: Connection, make: Callable[[], Peer], cpus: set[int]) -> None:
    """The peer's process: answers calls until the other end is closed."""
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(1)
    answer = functools.partial(_answer_of, pipe)
    peer = answer(make, False)
    while peer:
        try:
            method, arguments, wanted = pipe.recv()
        except EOFError:
            return
        answer(functools.partial(getattr(peer, method), *arguments), wanted)


def _answer_of(pipe: Connection, call: Callable[[], object], wanted: bool) -> object:
    """Sends the result of `call` if it is `wanted`, or else None, or what it raised; returns the result."""
    try:
        result = call()
    except (UserError, RuntimeError) as error:
        pipe.send(error)
        return None
    pipe.send(result.numpy().copy() if wanted and isinstance(result, Tensor) else None)
    return result
