"""Shadow experts inside a step on a GPU: a layer's job is published to mapped memory of the host, the shadow pool
computes it while the GPU computes the resident experts, and the sums are added by a kernel that reads them there. Jobs
go by the doorbell of csrc/bridge.cpp, one at a time, eagerly or in a captured graph."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.bridge.calls import BridgeJob
from umbra.ops.cpu.shadow import BridgeWorker, Pieces
from umbra.ops.cuda.bridge import GpuBridge
from umbra.ops.cuda.driver import Driver

LEFT: list["GpuNodes"] = []  # closed with work under way: their buffers stay until the process ends


class _Mapped:
    """Memory of the host as torch takes that of a GPU."""

    def __init__(self, tensor: Tensor):
        words = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
        kind = {2: "<i2", 4: "<f4" if words.is_floating_point() else "<i4", 8: "<i8"}[words.element_size()]
        self.__cuda_array_interface__ = {
            "shape": tuple(words.shape),
            "typestr": kind,
            "data": (words.data_ptr(), False),
            "version": 3,
        }
        self.tensor = tensor


def mapped(tensor: Tensor) -> Tensor:
    """A view of a pinned tensor that kernels of the GPU read and write over the link. The pinned tensor must outlive
    it."""
    view = torch.as_tensor(_Mapped(tensor), device="cuda")
    return view.view(tensor.dtype)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """Pinned zeros. `what` begins the message if the driver has no more pinned memory."""
    try:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise UserError(f"{what}: no pinned memory on the host for {dtype} {shape}: {error}") from None


@dataclass
class GpuBuffers:
    """The memory of the jobs of one size, which use it in turn. Captured graphs hold the addresses."""

    host: tuple[Tensor, ...]  # pinned: x (tokens, hidden), ids (tokens, top_k) int32, weights, places (experts) int32
    there: tuple[Tensor, ...]  # the same as the GPU sees them
    sums: Tensor  # as x, pinned
    seen_sums: Tensor  # the same as the GPU sees them
    payloads: dict[int, int]  # by layer


class GpuNodes:
    """The nodes of the layers with these numbers, which have `experts` experts each. Steps of at most `captured` tokens
    may be captured; longer ones share their buffers, and their jobs have powers of two of rows, of which those behind
    the step's are not written."""

    def __init__(
        self,
        worker: BridgeWorker,
        layers: Sequence[int],
        experts: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        captured: int,
        timeout_s: float,
    ):
        torch.cuda.current_stream()  # a context must exist
        self.bridge = GpuBridge(worker.submit, worker.context, timeout_s, True)
        self.layers, self.experts, self.hidden, self.top_k = layers, experts, hidden, top_k
        self.dtype, self.timeout_s, self.captured = dtype, timeout_s, captured
        self.buffers: dict[int, GpuBuffers] = {}  # by size
        self.shared: tuple[Tensor, ...] = ()  # pinned memory of long steps
        self.end = torch.cuda.Event()  # of the last step
        self.pending: int | None = None  # the layer between submit and join
        self.step = -1
        self.expected: dict[int, int] = {}  # layer -> the payload whose call the step waits for

    def size_of(self, tokens: int) -> int:
        """The rows of the jobs of a step of `tokens` tokens."""
        return tokens if tokens <= self.captured else 1 << (tokens - 1).bit_length()

    def prepare(self, size: int) -> None:
        """Allocates the buffers of jobs of `size` rows, which cannot be allocated while a graph is captured."""
        if size in self.buffers:
            return
        if size <= self.captured:
            kept = self._pinned(size)
        else:
            if not self.shared or len(self.shared[0]) < size:
                self.shared = self._pinned(size)
            kept = self.shared
        x, sums, ids, weights = (part[:size] for part in kept[:4])
        host = x, ids, weights, kept[4]
        addresses = [tensor.data_ptr() for tensor in (*host, sums)]
        payloads = {
            layer: self.bridge.payload(
                BridgeJob(*addresses, size, self.top_k, self.hidden, layer, -1, None), sums.nbytes
            )
            for layer in self.layers
        }
        self.buffers[size] = GpuBuffers(host, tuple(map(mapped, host)), sums, mapped(sums), payloads)

    def _pinned(self, tokens: int) -> tuple[Tensor, ...]:
        """x, sums, ids, weights and places."""
        rows, pairs = (tokens, self.hidden), (tokens, self.top_k)
        sizes = (rows, self.dtype), (rows, self.dtype), (pairs, torch.int32), (pairs, self.dtype)
        return tuple(
            pinned(shape, dtype, f"{tokens} tokens") for shape, dtype in (*sizes, ((self.experts,), torch.int32))
        )

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, layer: int) -> Tensor:
        """x (tokens, hidden), ids, weights (tokens, top_k), places (experts); below 0: not resident -> the snapshot of
        the places by which the host decides which experts are missing. The stream does not wait for the host."""
        from umbra.ops.cuda.kernels.publish import publish

        if self.pending is not None:
            raise RuntimeError(f"layer {layer} is submitted before layer {self.pending} has joined")
        buffers = self._of(len(x), layer)
        given = [tensor.contiguous() for tensor in (x, ids, weights, places)]
        sizes = [len(x)] * 3 + [self.experts]
        for name, tensor, to, size in zip(("x", "ids", "weights", "places"), given, buffers.host, sizes, strict=True):
            if tensor.shape != (size, *to.shape[1:]):
                raise ValueError(f"layer {layer}: {name} is {tensor.dtype} {tuple(tensor.shape)}")
        here = torch.empty_like(places)
        publish(given, (*buffers.there, here))
        self.expected[layer] = buffers.payloads[layer]
        self.bridge.launch(torch.cuda.current_stream().cuda_stream, buffers.payloads[layer])
        self.pending = layer
        return here

    def join(self, own: Tensor, layer: int) -> Tensor:
        """own (tokens, hidden), the resident experts' weighted sums in the model's type -> own + the host's sums."""
        if self.pending != layer:
            raise RuntimeError(f"layer {layer} joins, but was not submitted")
        self.pending = None
        self.bridge.wait_for_answer(torch.cuda.current_stream().cuda_stream)
        return own + self._of(len(own), layer).seen_sums[: len(own)]

    def _of(self, tokens: int, layer: int) -> GpuBuffers:
        if (size := self.size_of(tokens)) not in self.buffers:
            raise KeyError(f"layer {layer} was not prepared for {tokens} tokens")
        return self.buffers[size]

    def begin(self, step: int, tokens: int) -> None:
        """Must be called before the launches of a step and after `finish` of the step before."""
        self.step, self.pending = step, None
        captured = tokens <= self.captured and tokens in self.buffers
        self.expected = self.buffers[tokens].payloads if captured else {}
        self.bridge.begin(step)

    def finish(self) -> None:
        """Waits for the current stream. Raises BridgeError if a layer's sums did not arrive within timeout_s, or if the
        GPU's context has failed."""
        self.end.record()
        self.bridge.wait(
            lambda wait_ms: self.bridge.happened(self.end.cuda_event, wait_ms), self._missing, self.step, self.timeout_s
        )

    def _missing(self) -> str | None:
        """Names the first layer whose call of this step has not returned."""
        late = [layer for layer, payload in self.expected.items() if self.bridge.seen(payload) != self.step]
        return f"layer {min(late)}, step {self.step}: its job has not come, or not returned," if late else None

    def close(self) -> None:
        """Closes the bridge. Pending jobs return at once. Graphs that were captured with these nodes must not be
        replayed afterwards."""
        if self.bridge.handle and not self.bridge.close(self.timeout_s):
            LEFT.append(self)
            print("WARNING: experts on the CPU: closed with work under way; its buffers stay until the process ends")


class GpuCopies:
    """Copies of experts from registered memory to slots, on a stream of their own, each of which then writes a place.
    A place is written after all bytes of its expert, so a kernel that reads the place may read the slot."""

    def __init__(self, bridge: GpuBridge):
        self.bridge, self.driver, self.stream = bridge, Driver(), torch.cuda.Stream()
        self.tickets = itertools.count()
        self.under_way: dict[int, torch.cuda.Event] = {}

    def begin(self, to: int, source: Pieces, entry: int, value: int) -> int:
        """Copies a block to the address `to`, then writes `value` to the 64 bits at `entry`. -> a ticket"""
        ticket, event = next(self.tickets), torch.cuda.Event()
        self.send(to, source, self.stream)
        self.bridge.write(self.stream.cuda_stream, entry, value)
        event.record(self.stream)
        self.under_way[ticket] = event
        return ticket

    def send(self, to: int, source: Pieces, stream: torch.cuda.Stream) -> None:
        """Copies a block to the address `to` on `stream`."""
        for offset, start, nbytes in source.pieces:
            self.driver.cuMemcpyAsync(to + offset, source.address + start, nbytes, stream.cuda_stream)

    def done(self, ticket: int) -> bool:
        """Raises an error if the copy has failed."""
        if done := self.under_way[ticket].query():
            del self.under_way[ticket]
        return bool(done)

    def wait(self, ticket: int) -> None:
        self.under_way.pop(ticket).synchronize()
