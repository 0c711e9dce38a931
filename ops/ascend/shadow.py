"""Experts on the CPU inside a step on the NPU: `submit` starts the CPU's part, the NPU then computes the resident
experts, and `join` adds both sums.

    main    .. x, ids, weights | submit    resident experts    join | own + sums ..
    side                       |->  D2H, callback, H2D         ->|

The callback (bridge.py) passes the job to the shadow pool (Worker in ops/cpu/shadow.py) and blocks only the side
stream. It returns each token's weighted sum over the experts that are not resident, in the model's type, so `join` is
one Add. This works in eager mode and in captured graphs (acl_graph, npugraph_ex): their replays read new values from
the same buffers. The host runs each step as

    nodes.begin(step, tokens); logits = decode(..); nodes.finish()

Nothing here was run on an NPU.
"""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from ops.ascend.bridge import Bridge, Job
from ops.ascend.host_memory import pinned

SLICES = 8  # the host divides its wait into this many parts, and checks the callbacks after each

LIBRARY = torch.library.Library("umbra", "FRAGMENT")  # the ops live as long as this does
LIBRARY.define("shadow_submit(Tensor x, Tensor ids, Tensor weights, int layer, int nodes) -> Tensor")
LIBRARY.define("shadow_join(Tensor sums, Tensor own, int layer, int nodes) -> Tensor")


@dataclass
class Node:
    """One layer's buffers for one number of tokens. Captured graphs hold their addresses, so they are never freed."""

    x: Tensor  # (tokens, hidden), the model's type; this and the next three are pinned
    ids: Tensor  # (tokens, top_k) int32
    weights: Tensor  # (tokens, top_k), the model's type
    sums: Tensor  # as `x`
    fork: torch_npu.npu.Event
    back: torch_npu.npu.Event
    payload: int
    held: tuple[Tensor, ...] = ()  # kept from submit to join, so that memory in use on the side stream is not reused


class ShadowNodes:
    """The nodes of a model's layers. For each layer number, `slots` has a table (experts) int64 on the host, which is
    written in place between steps and passed with each job."""

    alive: dict[int, "ShadowNodes"] = {}  # number, as captured in graphs, -> nodes  # noqa: RUF012
    numbers = itertools.count()

    def __init__(
        self,
        submit: int,
        context: int,
        slots: Mapping[int, Tensor],
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        timeout_s: float,
        cann: str | None = None,
    ):
        if any(row.device.type != "cpu" or row.dtype != torch.int64 for row in slots.values()):
            raise ValueError("slots are to be int64 tables on the host")
        self.bridge = Bridge(submit, context, timeout_s, cann)
        self.slots, self.hidden, self.top_k, self.dtype, self.timeout_s = slots, hidden, top_k, dtype, timeout_s
        self.nodes: dict[tuple[int, int], Node] = {}  # (tokens, layer) -> node
        self.side = torch_npu.npu.Stream()
        self.bridge.subscribe(self.side.npu_stream)
        self.step, self.tokens = -1, 0
        self.number = next(self.numbers)
        self.alive[self.number] = self

    def prepare(self, tokens: int) -> None:
        """Allocates the buffers of steps of `tokens` tokens, which cannot be allocated while a graph is captured."""
        for layer in self.slots:
            if (tokens, layer) not in self.nodes:
                self.nodes[tokens, layer] = self.make_node(tokens, layer)

    def make_node(self, tokens: int, layer: int) -> Node:
        """Allocates one layer's buffers and registers them with the bridge."""
        wide, narrow = (tokens, self.hidden), (tokens, self.top_k)
        x, sums = (pinned(wide, self.dtype, f"layer {layer}") for _ in range(2))
        ids, weights = (pinned(narrow, dtype, f"layer {layer}") for dtype in (torch.int32, self.dtype))
        buffers = (x, ids, weights, self.slots[layer], sums)
        job = Job(*(t.data_ptr() for t in buffers), tokens, self.top_k, self.hidden, layer, -1, None)
        payload = self.bridge.payload(job, sums.nbytes)
        return Node(x, ids, weights, sums, torch_npu.npu.Event(), torch_npu.npu.Event(), payload)

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """x (tokens, hidden), ids, weights (tokens, top_k) -> sums (tokens, hidden), which are valid only after `join`.
        The main stream does not wait."""
        node = self._of(len(x), layer)
        for name, given, wanted in (("x", x, node.x), ("ids", ids, node.ids), ("weights", weights, node.weights)):
            if given.shape != wanted.shape or given.dtype != wanted.dtype or not given.is_contiguous():
                raise ValueError(f"layer {layer}: {name} is {given.dtype} {tuple(given.shape)}, or not contiguous")
        sums = torch.empty_like(x)
        node.fork.record()
        with torch_npu.npu.stream(self.side):
            node.fork.wait()
            node.x.copy_(x, non_blocking=True)
            node.ids.copy_(ids, non_blocking=True)
            node.weights.copy_(weights, non_blocking=True)
            # Reading `npu_stream` drains torch_npu's task queue, so the callback is enqueued after the copies.
            self.bridge.launch(self.side.npu_stream, node.payload)
            sums.copy_(node.sums, non_blocking=True)
            node.back.record()
        node.held = (x, ids, weights, sums)
        return sums

    def join(self, sums: Tensor, own: Tensor, layer: int) -> Tensor:
        """own (tokens, hidden), the resident experts' weighted sums in the model's type -> own + sums."""
        node = self._of(len(sums), layer)
        if own.shape != sums.shape or own.dtype != sums.dtype:
            raise ValueError(f"layer {layer}: own is {own.dtype} {tuple(own.shape)}")
        node.back.wait()
        node.held = ()
        return own + sums

    def _of(self, tokens: int, layer: int) -> Node:
        if (tokens, layer) not in self.nodes:
            raise KeyError(f"layer {layer} was not prepared for {tokens} tokens")
        return self.nodes[tokens, layer]

    def begin(self, step: int, tokens: int) -> None:
        """Must be called before the launches of a step and after `finish` of the step before."""
        self.step, self.tokens = step, tokens
        self.bridge.begin(step)

    def finish(self) -> None:
        """Waits for the main stream. Raises BridgeError if a layer's sums did not arrive within timeout_s."""
        stream = torch_npu.npu.current_stream().npu_stream
        slice_ms = max(1, int(self.timeout_s * 1000 / SLICES))
        events, since = self.bridge.events(), time.monotonic()
        while not self.bridge.idle(stream, slice_ms):
            if self.bridge.events() != events:
                events, since = self.bridge.events(), time.monotonic()
            # A running callback detects that its worker takes too long, unless `submit` itself does not return.
            limit = self.timeout_s * (2 if events % 2 else 1)
            layer = self._missing()
            if layer is not None and time.monotonic() - since >= limit:
                self.bridge.check(
                    f"layer {layer}, step {self.step}: its callback has not come, or not returned, within {limit} s"
                )
        self.bridge.check()

    def _missing(self) -> int | None:
        """The first layer whose callback of this step has not returned; None if all have."""
        layers = sorted(layer for tokens, layer in self.nodes if tokens == self.tokens)
        seen = (layer for layer in layers if self.bridge.seen(self.nodes[self.tokens, layer].payload) != self.step)
        return next(seen, None)

    def close(self) -> None:
        """Closes the bridge. Pending callbacks return at once. Graphs that were captured with these nodes must not be
        replayed afterwards."""
        if self.alive.pop(self.number, None) is None:
            return
        torch_npu.npu.current_stream().npu_stream  # noqa: B018 (drains torch_npu's task queue)
        if not self.bridge.close(self.timeout_s):
            LEFT.append(self)
            print("WARNING: experts on the CPU: closed with work under way; its buffers stay until the process ends")


LEFT: list[ShadowNodes] = []


def _submit(x: Tensor, ids: Tensor, weights: Tensor, layer: int, nodes: int) -> Tensor:
    return ShadowNodes.alive[nodes].submit(x, ids, weights, layer)


def _join(sums: Tensor, own: Tensor, layer: int, nodes: int) -> Tensor:
    return ShadowNodes.alive[nodes].join(sums, own, layer)


LIBRARY.impl("shadow_submit", _submit, "PrivateUse1")
LIBRARY.impl("shadow_join", _join, "PrivateUse1")
LIBRARY.impl("shadow_submit", lambda x, ids, weights, layer, nodes: torch.empty_like(x), "Meta")
LIBRARY.impl("shadow_join", lambda sums, own, layer, nodes: torch.empty_like(own), "Meta")
