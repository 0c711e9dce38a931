"""The interface of a model family's model."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from models.batch import Batch


class CausalLM(nn.Module, ABC):
    """A model, made from (config, build). Its weights are then filled, and its attention layers are given their
    caches."""

    @abstractmethod
    def prefill(self, batch: Batch) -> Tensor:
        """Runs any number of new tokens of each sequence. -> logits (rows wanted, vocabulary)"""

    @abstractmethod
    def decode(self, batch: Batch) -> Tensor:
        """Runs one new token of each sequence; graphs are captured of this. -> logits (S, vocabulary)"""

    @abstractmethod
    def ignored_weights(self) -> frozenset[str]:
        """Checkpoint tensors that may be present although the model does not use them."""
