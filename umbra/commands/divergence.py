"""Compares the next-token distributions of a case with those of another case, read from a file of its logits.

The logits go through a file because memory may not hold two models at once, and the two cases may need different
numbers of ranks.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from umbra.base.errors import UserError

ROWS = 32  # positions compared together: with a vocabulary of 152k, each copy takes 19 MB


class LogitsWriter:
    """Writes the logits of the first pass as float32, window after window."""

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 (until the process ends)

    def __call__(self, logits: Tensor) -> None:
        """`logits`: (tokens, vocabulary) of the next window"""
        rest = logits.numpy().reshape(-1).view(np.uint8).data
        try:
            while rest:  # a disk that fills up takes a part first
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror}: shorten --text, or set TMPDIR"
            ) from None


class Divergence:
    """Compares the second pass with the first: the mean KL(P || Q) in nats, where P is the distribution in the file and
    Q that of the case itself, and how often both prefer the same token."""

    def __init__(self, path: Path):
        self.file = open(path, "rb")  # noqa: SIM115 (until the process ends)
        self.kl, self.same, self.positions = 0.0, 0, 0

    def __call__(self, logits: Tensor) -> None:
        """`logits`: (tokens, vocabulary) of the next window"""
        for q in logits.split(ROWS):
            p = torch.from_numpy(np.fromfile(self.file, np.float32, q.numel())).view_as(q)
            # in float32 the error is about 1e-8 nats, in a third of float64's time
            kl = kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True)
            self.kl += float(kl)
            self.same += int((p.argmax(-1) == q.argmax(-1)).sum())
            self.positions += len(q)

    def figures(self) -> dict[str, float]:
        return {
            "positions": self.positions,
            "kl_divergence": self.kl / self.positions,
            "top1_agreement": 100 * self.same / self.positions,
        }
