"""Banks for the values of 4-bit experts: room for one matrix of each expert of a layer, which all layers share.

A step of more tokens than the vector cores multiply needs a layer's experts as values, in FRACTAL_NZ. They are unpacked
on a side stream as soon as the product of the layer before has read the bank, concurrently with all that follows that
product:

    main    .. product of layer i | free    all-reduce, attention of layer i + 1 ..    ready | product of layer i + 1
    side                                 |-> unpack layer i + 1 |->

Nothing is unpacked ahead for a model's first layer. Compiled graphs do not use the banks: there each product follows
its unpack_w4a16. Nothing here was run on an NPU.
"""

import torch
import torch_npu
from torch import Tensor

from umbra.ops.ascend.vector_core.calls import unpack_into
from umbra.ops.ascend.weights import FRACTAL_NZ, Matrices, Role, StoredMatrices
from umbra.ops.interface import fixed


class TileBank:
    """The bank of matrices that are alike; implements ops.ascend.weights.Values. `add` is called with those of each
    layer, in the order of layers."""

    def __init__(self, like: Matrices, dtype: torch.dtype, side: torch_npu.npu.Stream):
        experts, columns, device = like.data.shape[0], like.data.shape[-2], like.data.device
        sizes = (experts, columns, like.columns)  # (E, N, K)
        if device.type == "npu":
            bank = torch_npu.empty_with_format(sizes, dtype=dtype, device=device, acl_format=FRACTAL_NZ)
        else:
            bank = torch.empty(sizes, dtype=dtype, device=device)
        self.bank, self.side = fixed(bank), side
        self.free, self.ready = torch_npu.npu.Event(), torch_npu.npu.Event()
        self.newest: StoredMatrices | None = None
        self.following: dict[StoredMatrices, StoredMatrices] = {}
        self.holds: StoredMatrices | None = None  # whose values are in the bank, or under way

    def add(self, experts: Matrices) -> None:
        if self.newest is not None:
            self.following[self.newest] = experts
        self.newest = experts
        experts.values = self

    def take(self, experts: StoredMatrices) -> Tensor:
        """The values of `experts`, (E, K, N), a view of rows of K. The current stream waits for them."""
        if self.holds is not experts:
            self._unpack(experts)
        self.ready.wait()
        return self.bank.transpose(-2, -1)

    def release(self, experts: StoredMatrices) -> None:
        """Must follow the product by the values of `experts`. Those of the next layer are unpacked then."""
        self.holds = None
        if experts in self.following:
            self._unpack(self.following[experts])

    def _unpack(self, experts: StoredMatrices) -> None:
        self.free.record()
        with torch_npu.npu.stream(self.side):
            self.free.wait()
            unpack_into(experts, self.bank)
            self.ready.record()
        self.holds = experts


class TileBanks:
    """A bank for each kind of matrix of a model's experts."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.side = dtype, torch_npu.npu.Stream()
        self.banks: dict[tuple[Role, torch.Size], TileBank] = {}

    def add(self, experts: Matrices) -> None:
        kind = experts.role, experts.data.shape
        if kind not in self.banks:
            self.banks[kind] = TileBank(experts, self.dtype, self.side)
        self.banks[kind].add(experts)
