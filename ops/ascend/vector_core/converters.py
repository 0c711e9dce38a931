"""Makes the vector-core ops nodes of a GE graph; imported for its effect. Captured graphs do not need this."""

from collections.abc import Callable
from typing import Any

import torch
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.ge import attr, custom_op

from umbra.ops.ascend.vector_core import schemas  # noqa: F401 (declares them)
from umbra.ops.ascend.vector_core.signatures import CALLS, TorchCall


def converter_of(call: TorchCall) -> Callable[..., Any]:
    """Returns what makes a node of the arguments of `call`."""

    def convert(*given: Any, **more: Any) -> Any:
        arguments = call.named(*given, **more) | dict(call.fixed)
        inputs = {operand.name: arguments[operand.name] for operand in call.op.operands}
        attrs = {a.name: (attr.Bool if a.boolean else attr.Int)(arguments[a.name]) for a in call.op.attributes}
        return custom_op(call.op.ge_name, inputs=inputs, attrs=attrs, outputs=["y"])

    return convert


for call in CALLS.values():
    if call.in_graphs:
        register_fx_node_ge_converter(getattr(torch.ops.umbra, call.name).default)(converter_of(call))
