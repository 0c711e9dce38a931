"""What engines have in common that benchmarks compare with Umbra's: token ids to logits, no sampling. The methods are
those of benchmarks.umbra.Umbra, and decode repeats one position in the same way."""

from abc import ABC, abstractmethod

from torch import Tensor

Token = tuple[int, int, int, bool]  # sequence, position, id, whether its logits are wanted


class Peer(ABC):
    lengths: list[int]

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
        self.lengths = [len(context) for context in contexts]

    def step(self, tokens: list[int]) -> Tensor:
        """Logits (sequences, vocabulary)."""
        for sequence, length in enumerate(self.lengths):
            self.remove(sequence, length)
        return self.decode([(s, self.lengths[s], token, True) for s, token in enumerate(tokens)])
