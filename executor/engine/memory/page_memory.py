"""The bytes of pages and of recurrent states, which are copied to the host and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from umbra.executor.engine.memory.pages import Block, States


class PageMemory:
    def __init__(self, sets: Sequence[Sequence[Tensor]], stride: int, states: Tensor, elements: Sequence[int]):
        """`sets` has for each set of layers the caches (pages, ...) that its pages lie in; `stride` is of the numbers
        of pages. `states` (places, ...) are float32 from whose first one on each layer's states lie, as many as
        `elements` says."""
        self._sets, self._stride, self._elements = sets, stride, elements
        self._flat, self._unit = states.view(-1), states[0].numel()
        self.page_bytes = [sum(cache[0].nbytes for cache in caches) for caches in sets]
        self.state_bytes = 4 * sum(elements)

    @property
    def layout(self) -> list[list[tuple[tuple[int, ...], str]]]:
        """Returns the shapes and types that decide what the bytes of a page mean."""
        return [[(tuple(cache.shape[1:]), str(cache.dtype)) for cache in caches] for caches in self._sets]

    def _parts(self, block: Block, number: int) -> list[Tensor]:
        if isinstance(block, States):
            starts = (unit * self._unit for unit in block.places)
            return [self._flat[at : at + count] for at, count in zip(starts, self._elements, strict=True)]
        return [cache[block.page // self._stride] for cache in self._sets[number]]

    def save(self, block: Block, number: int) -> bytearray:
        """The bytes of a page of the set of layers `number`, or of states."""
        data = bytearray(self.state_bytes if isinstance(block, States) else self.page_bytes[number])
        for part, of in self._beside(block, number, memoryview(data)):
            of.copy_(part)
        return data

    def load(self, block: Block, number: int, data: memoryview) -> None:
        for part, of in self._beside(block, number, data):
            part.copy_(of)

    def _beside(self, block: Block, number: int, data: memoryview) -> list[tuple[Tensor, Tensor]]:
        """Each part of the block, and its place in `data`."""
        whole, end, pairs = torch.frombuffer(data, dtype=torch.uint8), 0, list[tuple[Tensor, Tensor]]()
        for part in self._parts(block, number):
            start, end = end, end + part.nbytes
            pairs.append((part.view(-1).view(torch.uint8), whole[start:end]))
        return pairs
