"""Experts on the CPU inside a step on the NPU: `submit` starts the CPU's part, the NPU then computes the resident
experts, and `join` adds both sums.

    main    .. x, ids, weights | submit: D2D   resident experts    join | own + sums ..
    side                                |->  D2H, callback, H2D      ->|

Who is resident may change at any moment of a step, since copies of experts end when they do. So `submit` first copies
the layer's row of the table, and both sides decide by this copy: each pair of a token and an expert is computed by one
of them.

The callback (bridge.py) passes the job to the shadow pool (Worker in ops/cpu/shadow.py) and blocks only the side
stream. It returns each token's weighted sum over the experts that are not resident, in the model's type, so `join` is
one Add. This works in eager mode and in captured graphs (acl_graph, npugraph_ex): their replays read new values from
the same buffers. The host runs each step as

    nodes.begin(step, tokens); logits = decode(..); nodes.finish()

In long steps, which are eager, `rows` takes rows that each go to one expert, and gives back the rows that it makes of
them, a job of JOB_ROWS after another through one set of buffers, however many tokens a step has.

Nothing here was run on an NPU.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from umbra.ops.ascend.bridge import Bridge
from umbra.ops.ascend.host_memory import ON_DEVICE, pinned, send
from umbra.ops.bridge.calls import BridgeJob

LIBRARY = torch.library.Library("umbra", "FRAGMENT")  # the ops live as long as this does
LIBRARY.define(
    "shadow_submit(Tensor x, Tensor ids, Tensor weights, Tensor places, int layer, int nodes) -> (Tensor, Tensor)"
)
LIBRARY.define("shadow_join(Tensor sums, Tensor own, int layer, int nodes) -> Tensor")
LIBRARY.define("shadow_rows(Tensor x, Tensor ids, Tensor(a!) out, int layer, int nodes) -> ()")


@dataclass
class Node:
    """One layer's buffers for one number of tokens. Captured graphs hold their addresses, so they are never freed."""

    x: Tensor  # (tokens, hidden), the model's type; this and the next four are pinned
    ids: Tensor  # (tokens, top_k) int32
    weights: Tensor  # (tokens, top_k), the model's type
    places: Tensor  # (experts) int32; below 0: not resident
    sums: Tensor  # as `x`
    fork: torch_npu.npu.Event
    back: torch_npu.npu.Event
    payload: int
    held: tuple[Tensor, ...] = ()  # kept from submit to join, so that memory in use on the side stream is not reused


class ShadowNodes:
    """The nodes of the layers with these numbers, which have `experts` experts each."""

    alive: dict[int, "ShadowNodes"] = {}  # number, as captured in graphs, -> nodes  # noqa: RUF012
    numbers = itertools.count()

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
        cann: str | None = None,
    ):
        self.bridge = Bridge(submit, context, timeout_s, cann)
        self.layers, self.experts, self.hidden, self.top_k = layers, experts, hidden, top_k
        self.dtype, self.timeout_s = dtype, timeout_s
        self.nodes: dict[tuple[int, int], Node] = {}  # (tokens, layer) -> node
        self.side = torch_npu.npu.Stream()
        self.bridge.subscribe(self.side.npu_stream)
        self.step = -1
        self.expected: dict[int, Node] = {}  # layer -> the node whose callback the step waits for
        self.begun: dict[int, torch_npu.npu.Event] = {}  # layer -> the event after its jobs, in a long step
        self.late: Callable[[], str | None] = lambda: None  # what else a long step waits for
        self.number = next(self.numbers)
        self.alive[self.number] = self

    def prepare(self, tokens: int) -> None:
        """Allocates the buffers of steps of `tokens` tokens, which cannot be allocated while a graph is captured."""
        for layer in self.layers:
            if (tokens, layer) not in self.nodes:
                self.nodes[tokens, layer] = self.make_node(tokens, layer)

    def make_node(self, tokens: int, layer: int) -> Node:
        """Allocates one layer's buffers and registers them with the bridge."""
        wide, narrow = (tokens, self.hidden), (tokens, self.top_k)
        x, sums = (pinned(wide, self.dtype, f"layer {layer}") for _ in range(2))
        ids, weights = (pinned(narrow, dtype, f"layer {layer}") for dtype in (torch.int32, self.dtype))
        return self._node(x, ids, weights, self._places(f"layer {layer}"), sums, layer)

    def _places(self, what: str) -> Tensor:
        return pinned((self.experts,), torch.int32, what)

    def _node(self, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, sums: Tensor, layer: int) -> Node:
        job = BridgeJob(
            *(t.data_ptr() for t in (x, ids, weights, places, sums)), *ids.shape, self.hidden, layer, -1, None
        )
        payload = self.bridge.payload(job, sums.nbytes)
        return Node(x, ids, weights, places, sums, torch_npu.npu.Event(), torch_npu.npu.Event(), payload)

    def prepare_rows(self, job_rows: int) -> None:
        """Allocates the buffers of `rows`, jobs of so many, which differ from all numbers of tokens of other steps."""
        x, sums = (pinned((job_rows, self.hidden), self.dtype, "long steps") for _ in range(2))
        ids, weights = (pinned((job_rows, 1), dtype, "long steps") for dtype in (torch.int32, self.dtype))
        weights.fill_(1)
        nobody = self._places("long steps").fill_(-1)
        self.of_rows = {layer: self._node(x, ids, weights, nobody, sums, layer) for layer in self.layers}

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """x (tokens, hidden), ids, weights (tokens, top_k), places (experts) int32 -> sums (tokens, hidden), which are
        valid only after `join`, and the places by which the host decides which experts are missing: those below 0. The
        main stream does not wait."""
        node = self._of(len(x), layer)
        for name, given, wanted in (
            ("x", x, node.x),
            ("ids", ids, node.ids),
            ("weights", weights, node.weights),
            ("places", places, node.places),
        ):
            if given.shape != wanted.shape or given.dtype != wanted.dtype or not given.is_contiguous():
                raise ValueError(f"layer {layer}: {name} is {given.dtype} {tuple(given.shape)}, or not contiguous")
        sums, here = torch.empty_like(x), torch.empty_like(places)
        send([(here, places)], ON_DEVICE)
        node.fork.record()
        with torch_npu.npu.stream(self.side):
            node.fork.wait()
            node.x.copy_(x, non_blocking=True)
            node.ids.copy_(ids, non_blocking=True)
            node.weights.copy_(weights, non_blocking=True)
            node.places.copy_(here, non_blocking=True)
            # Reading `npu_stream` drains torch_npu's task queue, so the callback is enqueued after the copies.
            self.bridge.launch(self.side.npu_stream, node.payload)
            sums.copy_(node.sums, non_blocking=True)
            node.back.record()
        node.held = (x, ids, weights, here, sums)
        return sums, here

    def join(self, sums: Tensor, own: Tensor, layer: int) -> Tensor:
        """own (tokens, hidden), the resident experts' weighted sums in the model's type -> own + sums."""
        node = self._of(len(sums), layer)
        if own.shape != sums.shape or own.dtype != sums.dtype:
            raise ValueError(f"layer {layer}: own is {own.dtype} {tuple(own.shape)}")
        node.back.wait()
        node.held = ()
        return own + sums

    def rows(self, x: Tensor, ids: Tensor, out: Tensor, layer: int) -> None:
        """x (n, hidden), the expert of each row in ids, int32, filled up to whole jobs with -1 -> out (n, hidden),
        which is valid only after `join_rows`. The main stream does not wait."""
        node = self.of_rows[layer]
        self.begun[layer] = node.back
        node.fork.record()
        with torch_npu.npu.stream(self.side):
            node.fork.wait()
            for part, chosen, result in zip(
                x.split(len(node.x)), ids.view(-1, *node.ids.shape), out.split(len(node.x)), strict=True
            ):
                node.x[: len(part)].copy_(part, non_blocking=True)
                node.ids.copy_(chosen, non_blocking=True)
                self.bridge.launch(self.side.npu_stream, node.payload)
                result.copy_(node.sums[: len(part)], non_blocking=True)
            node.back.record()
        node.held = (x, ids, out)

    def join_rows(self, layer: int) -> None:
        self.of_rows[layer].back.wait()
        self.of_rows[layer].held = ()

    def _of(self, tokens: int, layer: int) -> Node:
        if (tokens, layer) not in self.nodes:
            raise KeyError(f"layer {layer} was not prepared for {tokens} tokens")
        return self.nodes[tokens, layer]

    def begin(self, step: int, tokens: int) -> None:
        """Must be called before the launches of a step and after `finish` of the step before."""
        self.step = step
        self.expected = {layer: node for (of, layer), node in self.nodes.items() if of == tokens}
        self.begun.clear()
        self.bridge.begin(step)

    def finish(self) -> None:
        """Waits for the main stream. Raises BridgeError if a layer's sums did not arrive within timeout_s."""
        stream = torch_npu.npu.current_stream().npu_stream
        self.bridge.wait(lambda wait_ms: self.bridge.idle(stream, wait_ms), self._missing, self.step, self.timeout_s)

    def _missing(self) -> str | None:
        """Names what the main stream waits for: the first layer whose callback of this step has not returned, or
        else."""
        late = [layer for layer, node in self.expected.items() if self.bridge.seen(node.payload) != self.step]
        late += [layer for layer, event in self.begun.items() if not happened(event)]
        if late:
            return f"layer {min(late)}, step {self.step}: its callback has not come, or not returned,"
        return self.late()

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


def happened(event: torch_npu.npu.Event) -> bool:
    """Returns whether the event has happened, without an error."""
    try:
        return bool(event.query())
    except RuntimeError:
        return False


def _submit(x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, layer: int, nodes: int) -> tuple[Tensor, Tensor]:
    return ShadowNodes.alive[nodes].submit(x, ids, weights, places, layer)


def _join(sums: Tensor, own: Tensor, layer: int, nodes: int) -> Tensor:
    return ShadowNodes.alive[nodes].join(sums, own, layer)


def _rows(x: Tensor, ids: Tensor, out: Tensor, layer: int, nodes: int) -> None:
    ShadowNodes.alive[nodes].rows(x, ids, out, layer)


LIBRARY.impl("shadow_rows", _rows, "PrivateUse1")
LIBRARY.impl("shadow_submit", _submit, "PrivateUse1")
LIBRARY.impl("shadow_join", _join, "PrivateUse1")
LIBRARY.impl(
    "shadow_submit",
    lambda x, ids, weights, places, layer, nodes: (torch.empty_like(x), torch.empty_like(places)),
    "Meta",
)
LIBRARY.impl("shadow_join", lambda sums, own, layer, nodes: torch.empty_like(own), "Meta")
