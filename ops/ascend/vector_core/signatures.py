"""The vector-core ops, each described once. schemas.py makes torch's schemas of these descriptions, converters.py nodes
of GE graphs, headers.py the C++ of op_host and of the torch extension.

An op's arguments are its operands in order, then its attributes. Python takes some of them together, as the objects of
PARTS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor


class OperandKind(Enum):
    """The types that an operand may have."""

    ROWS = "float16 or bfloat16, all operands of an op the same"
    SCORES = "the type of rows, or float32"
    BYTES = "uint8"
    INTS = "int32"
    FLOATS = "float32"


@dataclass(frozen=True)
class Argument:
    name: str


@dataclass(frozen=True)
class Operand(Argument):
    kind: OperandKind
    optional: bool = False


@dataclass(frozen=True)
class Attribute(Argument):
    boolean: bool = False
    optional: bool = False  # False, if it is left out


@dataclass(frozen=True)
class Op:
    """An operator of the package. Its kernel takes the addresses of its operands, and of the result y."""

    name: str
    operands: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]

    @property
    def ge_name(self) -> str:
        return f"Umbra{''.join(word.capitalize() for word in self.name.split('_'))}"


@dataclass(frozen=True)
class TorchCall:
    """`torch.ops.umbra.NAME`: a call of `op`, some of whose attributes are fixed. It returns the result or writes it
    to `into`."""

    name: str
    op: Op
    fixed: Mapping[str, bool] = field(default_factory=dict)
    into: str = ""
    in_graphs: bool = True  # whether GE graphs have it

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return tuple(attribute for attribute in self.op.attributes if attribute.name not in self.fixed)

    @property
    def schema(self) -> str:
        arguments = [f"Tensor{'?' * operand.optional} {operand.name}" for operand in self.op.operands]
        arguments += [f"{'bool' if a.boolean else 'int'} {a.name}{'=False' * a.optional}" for a in self.attributes]
        arguments += [f"Tensor(a!) {self.into}"] if self.into else []
        return f"{self.name}({', '.join(arguments)}) -> {'()' if self.into else 'Tensor'}"

    def named(self, *given: Any, **more: Any) -> dict[str, Any]:
        """Returns the arguments of a call by their names; attributes that are left out are False."""
        names = [argument.name for argument in (*self.op.operands, *self.attributes)] + [self.into] * bool(self.into)
        return dict.fromkeys(names, False) | dict(zip(names, given, strict=False)) | more

    def objects(self, *given: Any, **more: Any) -> dict[str, Any]:
        """Returns the arguments of a call as Python takes them, without float_sums: the result is the same."""
        arguments = self.named(*given, **more)
        arguments.pop(FLOAT_SUMS.name, None)
        for name, (kind, members) in PARTS.items():
            if arguments.keys() >= {*members}:
                arguments[name] = kind(*(arguments.pop(member) for member in members))
        return arguments


class InPlanes(NamedTuple):
    """A matrix of 4 bits in planes (planes.py), or those of all experts."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int


class ExpertChoice(NamedTuple):
    """The choice of experts by their scores. The experts here begin with number `first_expert`."""

    top_k: int
    sigmoid: bool
    first_expert: int


class BlockSizes(NamedTuple):
    """The sizes of an expert's block in an arena (blocks.py)."""

    inner: int
    group: int
    group2: int
    zeros: bool


PARTS: dict[str, tuple[type[tuple[Any, ...]], tuple[str, ...]]] = {
    "up": (InPlanes, ("w13", "s13", "z13", "group")),
    "down": (InPlanes, ("w2", "s2", "z2", "group2")),
    "weight": (InPlanes, ("w", "scales", "zeros", "group")),
    "choice": (ExpertChoice, ExpertChoice._fields),
    "sizes": (BlockSizes, BlockSizes._fields),
}


def _matrix(words: str, scales: str, zeros: str) -> tuple[Operand, ...]:
    return (
        Operand(words, OperandKind.BYTES),
        Operand(scales, OperandKind.ROWS),
        Operand(zeros, OperandKind.ROWS, optional=True),
    )


X, WEIGHT = Operand("x", OperandKind.ROWS), _matrix("w", "scales", "zeros")
BANK = X, *_matrix("w13", "s13", "z13"), *_matrix("w2", "s2", "z2")
ROUTED = Operand("ids", OperandKind.INTS), Operand("weights", OperandKind.ROWS)
GROUPS, FLOAT_SUMS = (Attribute("group"), Attribute("group2")), Attribute("float_sums", boolean=True, optional=True)

FUSED_MOE = Op("fused_moe_w4a16", (*BANK, *ROUTED), (*GROUPS, FLOAT_SUMS))
FUSED_MOE_SCORES = Op(
    "fused_moe_scores_w4a16",
    (*BANK, Operand("scores", OperandKind.SCORES), Operand("bias", OperandKind.FLOATS, optional=True)),
    (Attribute("top_k"), Attribute("sigmoid", boolean=True), Attribute("first_expert"), *GROUPS, FLOAT_SUMS),
)
FUSED_MOE_SLOTS = Op(
    "fused_moe_slots_w4a16",
    (X, Operand("arena", OperandKind.BYTES), Operand("places", OperandKind.INTS), *ROUTED),
    (Attribute("inner"), *GROUPS, Attribute("zeros", boolean=True), FLOAT_SUMS),
)
GEMV = Op("gemv_w4a16", (X, *WEIGHT), (Attribute("group"), FLOAT_SUMS))
UNPACK = Op(
    "unpack_w4a16",
    WEIGHT,
    (Attribute("group"), *(Attribute(name, boolean=True) for name in ("ordered", "pairs", "tiles"))),
)
OPS = FUSED_MOE, FUSED_MOE_SCORES, FUSED_MOE_SLOTS, GEMV, UNPACK

# GE graphs refuse experts on the CPU (ops/ascend/shadow.py), and in them a product follows its unpack_w4a16, whose
# result is ND.
CALLS = {
    call.name: call
    for call in (
        TorchCall(FUSED_MOE.name, FUSED_MOE),
        TorchCall(FUSED_MOE_SCORES.name, FUSED_MOE_SCORES),
        TorchCall(FUSED_MOE_SLOTS.name, FUSED_MOE_SLOTS, in_graphs=False),
        TorchCall(GEMV.name, GEMV),
        TorchCall(UNPACK.name, UNPACK, {"tiles": False}),
        TorchCall("unpack_tiles_w4a16", UNPACK, {"tiles": True}, into="bank", in_graphs=False),
    )
}
