"""What every model family's model offers to the executor."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from models.batch import Batch


class CausalLM(nn.Module, ABC):
    """Made from (config, build): layers whose weights are not filled yet and attention without caches."""

    @abstractmethod
    def prefill(self, batch: Batch) -> Tensor:
        """New tokens of sequences, any number of each. -> logits (rows wanted, vocabulary)"""

    @abstractmethod
    def decode(self, batch: Batch) -> Tensor:
        """One new token of each sequence: the step that graphs are made of. -> logits (S, vocabulary)"""

    @abstractmethod
    def ignored_weights(self) -> frozenset[str]:
        """Checkpoint tensors that may be present although the model does not use them."""
