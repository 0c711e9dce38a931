"""torchair's max-autotune mode without GE: torchair really lowers FX to a GE graph, which is kept instead of run.

with ge_programs() as programs:
    compiled(x)          # gives zeroes of the right shapes and dtypes; refused if a node breaks a rule of CANN
(program,) = programs
assert program.count()["MatMul"] == 1
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import sympy
import torch

# Never import torch_npu.dynamo.torchair: that makes a second copy of the module, which is not patched.
from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef, OpDef, TensorDescriptor
from torchair.core import _backend
from torchair.ge import _ge_graph

from tests.ascend.ge_rules import broken_rules

Shape = tuple[int | str, ...]  # a dimension that is known only at run time is its formula, such as "s27", or else -1


@dataclass(frozen=True)
class Value:
    """A tensor between nodes. torchair has the shapes of tensors of the FX graph. Others, such as a transposed weight
    before a product, have None and a meaningless dtype: GE would infer both."""

    source: str  # "node:output"
    shape: Shape | None
    dtype: torch.dtype
    symbol: str = ""  # of a graph input that is an integer: its formula


@dataclass(frozen=True)
class Node:
    type: str
    name: str
    inputs: list[str]  # "node:output"; "node:-1" is an order and not a tensor, "" an absent input
    outputs: list[Value]
    proto: OpDef  # with the attributes: node.proto.attr["transpose_x1"].b


class GeProgram:
    """The input of GE: the graph after torchair's own passes, and the compile options."""

    def __init__(self, graph: GraphDef, options: dict[str, str]) -> None:
        self.graph = GraphDef()
        self.graph.CopyFrom(graph)
        self.options = options
        self.runs = 0
        self.nodes = [
            Node(
                op.type, op.name, list(op.input), [value(f"{op.name}:{i}", d) for i, d in enumerate(op.output_desc)], op
            )
            for op in self.graph.op
        ]

    def count(self) -> Counter[str]:
        """Nodes of each type."""
        return Counter(node.type for node in self.nodes)

    def of(self, *types: str) -> list[Node]:
        return [node for node in self.nodes if node.type in types]

    def inputs(self) -> list[Value]:
        """The graph's inputs in the order in which they are passed."""
        data = sorted(self.of("Data", "RefData"), key=lambda node: node.proto.attr["index"].i)
        return [node.outputs[0] for node in data]

    def outputs(self) -> list[Value]:
        (net,) = self.of("NetOutput")
        sources = [name for name in net.inputs if not name.endswith(":-1")]
        return [value(source, desc) for source, desc in zip(sources, net.proto.input_desc, strict=True)]

    def run(self, inputs: list[torch.Tensor], assigned: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Zeroes for each output; an output that GE would write into an input is that input, unchanged."""
        self.runs += 1
        sizes: dict[str, int] = {}
        for declared, given in zip(self.inputs(), inputs, strict=True):
            assert declared.dtype == given.dtype, f"{declared} was given {given.dtype}"
            if declared.symbol:
                sizes[declared.symbol] = int(given)
                continue
            assert declared.shape is not None
            for size, actual in zip(declared.shape, given.shape, strict=True):
                assert isinstance(size, str) or size in (actual, -1), f"{declared} was given {tuple(given.shape)}"
                if isinstance(size, str):
                    sizes[size] = actual
        outputs = self.outputs()
        assigned = assigned or [None] * len(outputs)
        return [
            torch.zeros(at_run_time(out.shape, sizes), dtype=out.dtype, device="npu") if into is None else into
            for out, into in zip(outputs, assigned, strict=True)
        ]


def value(source: str, desc: TensorDescriptor) -> Value:
    """torchair notes a tensor's FX shape as text, such as "Tensor(dtype=torch.float32, shape=torch.Size([s27, 16])".
    The note of an input that is written in place through a view is of the view, and so the dimensions proper, -1 if
    unknown, come first."""
    dtype = _ge_graph.ge_type_to_torch_type(_ge_graph._ge_proto_dtype_to_ge_dtype(desc.dtype))
    meta = desc.attr["_meta"].s.decode()
    if number := re.fullmatch(r"<class 'torch.SymInt'>\((.*)\)", meta):
        return Value(source, (), dtype, symbol=number[1])
    dims: Shape | None = tuple(desc.shape.dim) or None
    noted: Shape | None = None
    if tensor := re.fullmatch(r"Tensor\(.*, shape=torch\.Size\(\[(.*)\]\)", meta):
        sizes = re.split(r", (?![^(]*\))", tensor[1]) if tensor[1] else []
        noted = tuple(int(size) if size.isdigit() else size for size in sizes)
    if dims is None or (noted is not None and -1 in dims and len(dims) == len(noted)):
        dims = noted
    return Value(source, dims, dtype)


def at_run_time(shape: Shape | None, sizes: dict[str, int]) -> list[int]:
    """`shape` with its formulas, in the notation of sympy and PyTorch, evaluated for `sizes`."""
    words = {name: getattr(torch.utils._sympy.functions, name) for name in torch.utils._sympy.functions.__all__}
    assert shape is not None
    return [int(sympy.sympify(size, locals=words).subs(sizes)) if isinstance(size, str) else size for size in shape]


@contextmanager
def ge_programs() -> Iterator[list[GeProgram]]:
    """The programs that torchair passes to GE in this block, in order. Later calls of compiled functions must be in
    such a block as well, since there is no GE to run them."""
    programs: list[GeProgram] = []

    def load(self: _backend.TorchNpuGraph, graph: _ge_graph.GeGraph, options: dict[str, str] | None = None) -> None:
        self.program = GeProgram(graph._proto, dict(options or {}))
        programs.append(self.program)
        if broken := broken_rules(self.program):
            raise RuntimeError("; ".join(broken))

    def run(
        self: _backend.TorchNpuGraph,
        inputs: list[torch.Tensor],
        assigned_outputs: tuple[torch.Tensor | None, ...] = (),
        stream: object = None,
    ) -> list[torch.Tensor]:
        return self.program.run(inputs, list(assigned_outputs))

    with (
        patch.multiple(_backend.TorchNpuGraph, load=load, compile=lambda self: None, run=run),
        # There are no operator libraries, neither CANN's nor ours.
        patch.object(_backend._torchair, "check_cann_compat", lambda *names: ""),
        patch.object(_backend._torchair, "get_registered_ir_def", lambda type: ("SUCCESS", [], [], [])),
    ):
        yield programs
