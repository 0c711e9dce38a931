"""Random weights in place of a checkpoint, for benchmarks."""

import torch
from torch import nn

from umbra.models.layers.base import layers_of


def random_weights(model: nn.Module, seed: int) -> None:
    """Fills every weight of `model` with numbers of the mean and spread that its piece says.

    Writes at the speed of memory: all matrices are cut from one block of random numbers. The length of the block
    shares no factor with the length of a row, so that no two rows or experts are equal. The largest matrices, whose
    numbers take several times their memory before they are packed, are filled while the others take none.
    """
    block = torch.randn((1 << 22) - 3, generator=torch.Generator().manual_seed(seed))
    offset = 0
    pieces = [piece for path, layer in layers_of(model) for piece in layer.pieces(path) if not layer.mapped]
    for piece in sorted(pieces, key=lambda piece: piece.kept_elements, reverse=True):
        if piece.fill is None:
            continue
        parts, missing = [], piece.kept_elements
        while missing:
            parts.append(block[offset : offset + missing])
            offset = (offset + len(parts[-1])) % len(block)
            missing -= len(parts[-1])
        piece.fill(torch.cat(parts).view(piece.kept_shape).mul_(piece.spread).add_(piece.mean))
    for path, layer in layers_of(model):
        if layer.mapped:  # all pieces are one, or they would not fit the memory
            pieces = list(layer.pieces(path))
            once = torch.empty(pieces[0].kept_shape, dtype=torch.float16).normal_(0, pieces[0].spread)
            for piece in pieces:
                if piece.fill:
                    piece.fill(once)
