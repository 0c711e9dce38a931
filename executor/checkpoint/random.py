"""Random weights in place of a checkpoint, for benchmarks."""

import torch
from torch import nn

from models.layers.base import layers_of


def random_weights(model: nn.Module, seed: int) -> None:
    """Fills every weight of `model`: matrices with zero mean and the scale of a trained model, norms with ones.

    Writes at the speed of memory: all matrices are cut from one block of random numbers. The length of the block
    shares no factor with the length of a row, so that no two rows or experts are equal.
    """
    block = torch.randn((1 << 22) - 3, generator=torch.Generator().manual_seed(seed)) * 0.02
    offset = 0
    for path, layer in layers_of(model):
        for piece in layer.pieces(path):
            if piece.fill is None:
                continue
            if len(piece.shape) == 1:
                piece.fill(torch.ones(piece.kept_shape))
                continue
            parts, missing = [], piece.kept_elements
            while missing:
                parts.append(block[offset : offset + missing])
                offset = (offset + len(parts[-1])) % len(block)
                missing -= len(parts[-1])
            piece.fill(torch.cat(parts).view(piece.kept_shape))
