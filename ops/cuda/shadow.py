"""Shadow experts inside a step on a GPU: a layer's job is published to mapped memory of the host, the shadow pool
computes it while the GPU computes the resident experts, and the sums are added by a kernel that reads them there. Both
ways of csrc/bridge.cpp work eagerly and in a captured graph."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.ops.bridge.calls import BridgeError, BridgeJob
from umbra.ops.cuda.bridge import GpuBridge

SLICES = 8  # the host divides its wait into this many parts, and checks the calls after each
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
class GpuNode:
    """One layer's buffers for one number of tokens. Captured graphs hold their addresses, so they are never freed."""

    host: tuple[Tensor, ...]  # pinned: x (tokens, hidden), ids (tokens, top_k) int32, weights, places (experts) int32
    there: tuple[Tensor, ...]  # the same as the GPU sees them
    sums: Tensor  # as x, pinned
    seen_sums: Tensor  # the same as the GPU sees them
    payload: int
    fork: torch.cuda.Event
    back: torch.cuda.Event


class GpuNodes:
    """The nodes of the layers with these numbers, which have `experts` experts each."""

    def __init__(
        self,
        submit: int,
        context: int,
        layers: Sequence[int],
        experts: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        timeout_s: float,
        doorbell: bool = True,
    ):
        torch.cuda.current_stream()  # a context must exist
        self.bridge = GpuBridge(submit, context, timeout_s, doorbell)
        self.layers, self.experts, self.hidden, self.top_k = layers, experts, hidden, top_k
        self.dtype, self.timeout_s = dtype, timeout_s
        self.nodes: dict[tuple[int, int], GpuNode] = {}  # (tokens, layer) -> node
        self.side = torch.cuda.Stream()
        self.end = torch.cuda.Event()  # of the last step
        self.arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.rings_in_kernel = doorbell  # or by the stream, after the kernel
        self.pending: int | None = None  # the layer between submit and join
        self.step = -1
        self.expected: dict[int, GpuNode] = {}  # layer -> the node whose call the step waits for
        self.bell = torch.zeros(1, dtype=torch.int32, device="cuda")
        if doorbell:
            self.bell = torch.as_tensor(_Word(self.bridge.bell), device="cuda")

    def prepare(self, tokens: int) -> None:
        """Allocates the buffers of steps of `tokens` tokens, which cannot be allocated while a graph is captured."""
        for layer in self.layers:
            if (tokens, layer) not in self.nodes:
                self.nodes[tokens, layer] = self._node(tokens, layer)

    def _node(self, tokens: int, layer: int) -> GpuNode:
        what, pairs = f"layer {layer}", (tokens, self.top_k)
        x, sums = (pinned((tokens, self.hidden), self.dtype, what) for _ in range(2))
        host = (
            x,
            pinned(pairs, torch.int32, what),
            pinned(pairs, self.dtype, what),
            pinned((self.experts,), torch.int32, what),
        )
        addresses = (t.data_ptr() for t in (*host, sums))
        job = BridgeJob(*addresses, tokens, self.top_k, self.hidden, layer, -1, None)
        payload = self.bridge.payload(job, sums.nbytes)
        there = tuple(map(mapped, host))
        return GpuNode(host, there, sums, mapped(sums), payload, torch.cuda.Event(), torch.cuda.Event())

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, layer: int) -> Tensor:
        """x (tokens, hidden), ids, weights (tokens, top_k), places (experts); below 0: not resident -> the snapshot of
        the places by which the host decides which experts are missing. The stream does not wait for the host."""
        if self.pending is not None:
            raise RuntimeError(f"layer {layer} is submitted before layer {self.pending} has joined")
        node = self._of(len(x), layer)
        for name, given, wanted in zip(
            ("x", "ids", "weights", "places"), (x, ids, weights, places), node.host, strict=True
        ):
            if given.shape != wanted.shape or not given.is_contiguous():
                raise ValueError(f"layer {layer}: {name} is {given.dtype} {tuple(given.shape)}, or not contiguous")
        here = torch.empty_like(places)
        rings = self.bridge.numbers[node.payload] if self.rings_in_kernel else 0
        self._publish(node, x, ids, weights, places, here, rings)
        if self.bridge.doorbell and not rings:
            self.bridge.launch(torch.cuda.current_stream().cuda_stream, node.payload)
        elif not rings:
            node.fork.record()
            with torch.cuda.stream(self.side):
                node.fork.wait()
                self.bridge.launch(self.side.cuda_stream, node.payload)
                node.back.record()
        self.pending = layer
        return here

    def _publish(
        self, node: GpuNode, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, here: Tensor, number: int
    ) -> None:
        from umbra.ops.cuda.kernels.publish import publish

        out = node.there
        publish(x, ids, weights, places, (out[0], out[1], out[2], out[3], here), self.arrived, self.bell, number)

    def join(self, own: Tensor, layer: int) -> Tensor:
        """own (tokens, hidden), the resident experts' weighted sums in the model's type -> own + the host's sums."""
        if self.pending != layer:
            raise RuntimeError(f"layer {layer} joins, but was not submitted")
        self.pending, node = None, self._of(len(own), layer)
        if self.bridge.doorbell:
            self.bridge.wait_for_answer(torch.cuda.current_stream().cuda_stream)
        else:
            node.back.wait()
        return own + node.seen_sums

    def _of(self, tokens: int, layer: int) -> GpuNode:
        if (tokens, layer) not in self.nodes:
            raise KeyError(f"layer {layer} was not prepared for {tokens} tokens")
        return self.nodes[tokens, layer]

    def begin(self, step: int, tokens: int) -> None:
        """Must be called before the launches of a step and after `finish` of the step before."""
        self.step, self.pending = step, None
        self.expected = {layer: node for (of, layer), node in self.nodes.items() if of == tokens}
        self.bridge.begin(step)

    def finish(self) -> None:
        """Waits for the current stream. Raises BridgeError if a layer's sums did not arrive within timeout_s, or if the
        GPU's context has failed."""
        self.end.record()
        slice_ms = max(1, int(self.timeout_s * 1000 / SLICES))
        events, since = self.bridge.events(), time.monotonic()
        while not self._ended(slice_ms):
            if self.bridge.events() != events:
                events, since = self.bridge.events(), time.monotonic()
            # A running call detects that its worker takes too long, unless `submit` itself does not return.
            limit = self.timeout_s * (2 if events % 2 else 1)
            if time.monotonic() - since >= limit and (missing := self._missing()):
                self.bridge.check(f"{missing} within {limit} s")
        self.bridge.check()

    def _ended(self, wait_ms: int) -> bool:
        try:
            return self.bridge.happened(self.end.cuda_event, wait_ms)
        except BridgeError as error:
            raise BridgeError(f"{self._missing() or f'step {self.step}'}: {error}") from None

    def _missing(self) -> str | None:
        """Names the first layer whose call of this step has not returned."""
        late = [layer for layer, node in self.expected.items() if self.bridge.seen(node.payload) != self.step]
        return f"layer {min(late)}, step {self.step}: its job has not come, or not returned," if late else None

    def close(self) -> None:
        """Closes the bridge. Pending jobs return at once. Graphs that were captured with these nodes must not be
        replayed afterwards."""
        if self.bridge.handle and not self.bridge.close(self.timeout_s):
            LEFT.append(self)
            print("WARNING: experts on the CPU: closed with work under way; its buffers stay until the process ends")


class _Word:
    """A word of mapped memory, by its address."""

    def __init__(self, address: int):
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i4", "data": (address, False), "version": 3}
