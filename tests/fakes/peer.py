"""A peer engine that dies."""

import os
import signal

import torch
from torch import Tensor

from umbra.tools.benchmarks.peer_engine import Peer, Token


class DyingPeer(Peer):
    """Answers with zeros; a decode of more than `most` tokens ends its process, as a kernel that crashes does."""

    state_start = 0

    def __init__(self, vocabulary: int, most: int):
        self.vocabulary, self.most = vocabulary, most

    def reserve(self, sequences: int, longest: int, at_once: int) -> None: ...

    def use(self, flash: bool) -> None: ...

    def clear(self) -> None: ...

    def remove(self, sequence: int, start: int) -> None: ...

    def decode(self, tokens: list[Token]) -> Tensor:
        if len(tokens) > self.most:
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.zeros(sum(wanted for *_, wanted in tokens), self.vocabulary)

    def state(self, sequence: int) -> bytes:
        return b""

    def restore(self, sequence: int, state: bytes) -> None: ...

    def close(self) -> None: ...
