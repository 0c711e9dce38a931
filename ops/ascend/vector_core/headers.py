"""Writes the C++ that follows from signatures.py: python -m umbra.ops.ascend.vector_core.headers

op_host/umbra_signatures.h    the places of operands and attributes, and the definition of each op
torch/umbra_calls.h           the arguments of each torch op, and its call of the device
"""

from pathlib import Path

from umbra.ops.ascend.vector_core.signatures import CALLS, OPS, Op, Operand, OperandKind, TorchCall

FOLDER = Path(__file__).parent
HOST, TORCH = FOLDER / "op_host" / "umbra_signatures.h", FOLDER / "torch" / "umbra_calls.h"
HEAD = "// Written by headers.py from signatures.py; change it there.\n// clang-format off\n#pragma once\n"
TYPES = {OperandKind.BYTES: "ge::DT_UINT8", OperandKind.INTS: "ge::DT_INT32", OperandKind.FLOATS: "ge::DT_FLOAT"}


def host() -> str:
    """Returns the header of op_host, in C++11."""
    ops = "".join(map(_definition, OPS))
    return f'{HEAD}#include "umbra_definitions.h"\n\nnamespace umbra {{\n\n{ops}}}  // namespace umbra\n'


def torch() -> str:
    """Returns the header of the torch extension, which computes a call by the function `compute` of its arguments."""
    calls = "".join(map(_arguments, CALLS.values()))
    registered = "".join(f'    ops.impl("{name}", {name}::op);\n' for name in CALLS)
    return f"{HEAD}\n{calls}inline void register_ops(torch::Library& ops) {{\n{registered}}}\n"


def _definition(op: Op) -> str:
    """Each operand has a variant for half and one for bfloat16, twice if scores are of that type or float."""
    times = 1 + any(operand.kind == OperandKind.SCORES for operand in op.operands)
    lines = [f"    {_parameter(operand, times)};" for operand in op.operands]
    lines.append(f'    rows(op.Output("y"), ops::REQUIRED, {times});')
    for attribute in op.attributes:
        presence, value = ("OPTIONAL", "false") if attribute.optional else ("REQUIRED", "")
        kind = "Bool" if attribute.boolean else "Int"
        lines.append(f'    op.Attr("{attribute.name}").AttrType(ops::{presence}).{kind}({value});')
    places, attributes = (
        ", ".join(argument.name.upper() for argument in arguments) for arguments in (op.operands, op.attributes)
    )
    return (
        f"namespace {op.name} {{\nenum Place : size_t {{ {places} }};\nenum Attribute : size_t {{ {attributes} }};\n"
        f"inline void define(ops::OpDef& op) {{\n" + "\n".join(lines) + f"\n}}\n}}  // namespace {op.name}\n\n"
    )


def _parameter(operand: Operand, times: int) -> str:
    presence = "ops::OPTIONAL" if operand.optional else "ops::REQUIRED"
    of = f'op.Input("{operand.name}"), {presence}'
    if operand.kind == OperandKind.SCORES:
        return f"scores({of})"
    return (
        f"rows({of}, {times})" if operand.kind == OperandKind.ROWS else f"fixed({of}, {TYPES[operand.kind]}, {times})"
    )


def _arguments(call: TorchCall) -> str:
    members = [(f"const {'MaybeTensor' if o.optional else 'Tensor'}&", o.name) for o in call.op.operands]
    members += [("bool" if a.boolean else "int64_t", a.name) for a in call.attributes]
    members += [("const Tensor&", call.into)] if call.into else []
    result = "void" if call.into else "Tensor"
    fixed = "".join(f"        const bool {name} = {str(value).lower()};\n" for name, value in call.fixed.items())
    sent = ", ".join([*(argument.name for argument in (*call.op.operands, *call.op.attributes)), "y"])
    kernel = f"aclnn{call.op.ge_name}"
    fields = "".join(f"    {kind} {name};\n" for kind, name in members)
    return (
        f"struct {call.name};\n{result} compute(const {call.name}& of);\n\n"
        f"struct {call.name} {{\n{fields}"
        f"    void launch(Tensor& y) const {{\n{fixed}        EXEC_NPU_CMD_EXT({kernel}, {sent});\n    }}\n"
        f"    static {result} op({', '.join(f'{kind} {name}' for kind, name in members)}) {{\n"
        f"        return compute({call.name}{{{', '.join(name for _, name in members)}}});\n    }}\n}};\n\n"
    )


if __name__ == "__main__":
    HOST.write_text(host())
    TORCH.write_text(torch())
