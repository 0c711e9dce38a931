"""`exe_mode: graph` on the CPU: the decode step, captured once for each number of sequences and replayed natively.

On several ranks the collectives are host nodes between the native ops.
"""

import dataclasses

from torch import Tensor

from executor.platform.base import Step
from models.batch import Batch
from ops.cpu.engine import Tape


class DecodeGraph:
    """One captured step: inputs at fixed addresses, updated in place; the logits always come out at the same place."""

    def __init__(self, step: Step, batch: Batch):
        self.inputs = {name: t.clone() for name, t in batch.tensors().items()}
        fixed = dataclasses.replace(batch, **self.inputs)  # type: ignore[arg-type]
        self.tape = Tape()
        with self.tape.capture():
            self.logits = step(fixed)

    def replay(self, batch: Batch) -> Tensor:
        for name, tensor in batch.tensors().items():
            self.inputs[name].copy_(tensor)
        self.tape.replay()
        return self.logits


class GraphStep:
    """A drop-in for the eager step. Capturing also computes, so a size that was never seen costs one eager step.

    The result is overwritten by the next call with as many sequences.
    """

    def __init__(self, step: Step):
        self.step = step
        self.graphs: dict[tuple[int, ...], DecodeGraph] = {}

    def __call__(self, batch: Batch) -> Tensor:
        size = batch.tokens_per_group or ()  # the same on every rank, so all capture together
        if size not in self.graphs:
            self.graphs[size] = DecodeGraph(self.step, batch)
            return self.graphs[size].logits
        return self.graphs[size].replay(batch)
