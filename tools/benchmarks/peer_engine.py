"""The interface of the engines that benchmarks compare with Umbra's: it turns token ids into logits and never samples.
The methods are those of tools.benchmarks.umbra_engine.Umbra, and decode repeats one position in the same way. A model
with recurrent states cannot forget a token, so its contexts grow by up to GROWTH tokens."""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

Token = tuple[int, int, int, bool]  # sequence, position, id, whether its logits are wanted


GROWTH = 128  # then the first contexts are restored, in less than a hundredth of the time


class Peer(ABC):
    lengths: list[int]
    state_start: int  # bytes of a sequence's state before the number of its tokens
    of_token: int = 8  # bytes of a token there, beside its keys, values and sequences
    recurrent = False  # whether the model has recurrent states
    kept: Sequence[bytes]  # then the states of the sequences at first
    grown: int

    @abstractmethod
    def reserve(self, sequences: int, longest: int, at_once: int) -> None:
        """Room for `sequences` of `longest` tokens, of which a step computes up to `at_once`. Forgets all sequences."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all sequences."""

    @abstractmethod
    def remove(self, sequence: int, start: int) -> None:
        """Forgets the tokens of a sequence from position `start` on."""

    @abstractmethod
    def decode(self, tokens: list[Token]) -> Tensor:
        """One step. -> logits (wanted, vocabulary), which the next step overwrites"""

    @abstractmethod
    def state(self, sequence: int) -> bytes:
        """The cached tokens of a sequence, as the engine saves them."""

    @abstractmethod
    def restore(self, sequence: int, state: bytes) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def prefill(self, prompt: list[int]) -> Tensor:
        """Logits (1, vocabulary) of the last token."""
        self.clear()
        return self.decode([(0, i, token, i == len(prompt) - 1) for i, token in enumerate(prompt)])

    def prefill_all(self, prompt: list[int]) -> Tensor:
        """Logits (tokens, vocabulary) of all tokens."""
        self.clear()
        return self.decode([(0, i, token, True) for i, token in enumerate(prompt)])

    def begin(self, contexts: list[list[int]]) -> None:
        """Cache `contexts`; each following `step` decodes one token after them."""
        self.clear()
        for sequence, context in enumerate(contexts):
            self.decode([(sequence, i, token, False) for i, token in enumerate(context)])
        self._keep(contexts, [self.state(sequence) for sequence in range(len(contexts))] if self.recurrent else ())

    def assume(self, contexts: list[list[int]]) -> None:
        """`begin` for contexts of one length without computing all of it: the keys and values of up to 64 tokens are
        repeated. Measures long contexts in short time."""
        length = len(contexts[0])
        self.begin([contexts[0][: math.gcd(length, 64)]])
        state = self.lengthened(self.state(0), length)
        self._keep(contexts, [state] * len(contexts))
        self._restore_all()

    def _keep(self, contexts: list[list[int]], states: Sequence[bytes]) -> None:
        self.lengths, self.kept, self.grown = [len(context) for context in contexts], states, 0

    def _restore_all(self) -> None:
        self.clear()
        for sequence, state in enumerate(self.kept):
            self.restore(sequence, state)
        self.grown = 0

    def step(self, tokens: list[int]) -> Tensor:
        """Logits (sequences, vocabulary)."""
        if not self.recurrent:
            for sequence, length in enumerate(self.lengths):
                self.remove(sequence, length)
        elif self.grown == GROWTH:
            self._restore_all()
        rows = self.decode([(s, self.lengths[s] + self.grown, token, True) for s, token in enumerate(tokens)])
        self.grown += self.recurrent
        return rows

    def steps(self, tokens: list[list[int]]) -> None:
        """A step for each of `tokens`."""
        for token in tokens:
            self.step(token)

    def behind(self, states: bytes, length: int) -> bytes:
        """The recurrent states that a sequence of `length` tokens has saved behind its caches, from `states`."""
        return states

    def lengthened(self, state: bytes, length: int) -> bytes:
        """The saved state of a sequence of `length` tokens, a multiple of those in `state`: their keys and values
        repeat.

        llama.cpp and ik_llama.cpp save a cache after `state_start` bytes. llama.cpp goes on with a zero for every other
        stream, and saves a second cache, after its number of streams, if there are layers with a window.
        """
        longer, at = [state[: self.state_start]], self.state_start
        while True:
            parts, at = _lengthened_cache(state, at, length, self.of_token)
            longer += parts
            while state[at : at + 4] == bytes(4):
                longer.append(bytes(4))
                at += 4
            if self.recurrent:
                return b"".join([*longer, self.behind(state[at:], length)])
            if at == len(state):
                return b"".join(longer)
            longer.append(state[at : at + 4])
            at += 4


def _lengthened_cache(state: bytes, at: int, length: int, of_token: int) -> tuple[list[bytes], int]:
    """The parts of the cache that starts at `at`, lengthened, and its end in `state`. A layer without one has a header.

    Saved are the number of tokens; of each token its position, a number of sequences and their ids; whether values are
    transposed; the number of layers; and of each layer's keys, then of each layer's values, a header of 12 bytes and
    the rows. The header has the type and the bytes of a token's row; or, of transposed values, the type, the bytes of
    an element and the number of rows, each with an element of every token.
    """
    (tokens,) = struct.unpack_from("<I", state, at)
    parts, at = [struct.pack("<I", length)], at + 4
    cell_bytes = of_token + 4 * struct.unpack_from("<I", state, at + 4)[0]
    ids = state[at + 4 : at + cell_bytes]
    parts += [struct.pack("<i", position) + ids for position in range(length)]
    at += tokens * cell_bytes
    transposed, layers = struct.unpack_from("<II", state, at)
    parts.append(state[at : at + 8])
    at += 8
    for part in range(2 * layers):
        if part == layers and not any(state[at:]):
            break  # latents are keys and values at once
        if transposed and part >= layers:
            _, element, rows = struct.unpack_from("<iII", state, at)
        else:
            (element,), rows = struct.unpack_from("<Q", state, at + 4), 1
        kept = np.frombuffer(state, np.uint8, rows * tokens * element, at + 12).reshape(rows, -1)
        parts += [state[at : at + 12], np.tile(kept, (1, length // tokens)).tobytes()]
        at += 12 + kept.size
    return parts, at
