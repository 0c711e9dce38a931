"""CANN's rules (tests/fakes/cann/rules.cpp) for the nodes of a GE graph: each is the kernel of the same operator."""

import ctypes
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.ascend.ge import GeProgram, Node, Value

_fake = ctypes.CDLL("libfake_cann.so")
_fake.fake_broken_rule.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t]
_fake.fake_broken_rule.restype = ctypes.c_char_p

KERNELS = {  # type of a node -> kernel
    "AddRmsNorm": "aclnnAddRmsNorm",
    "AddRmsNormDynamicQuant": "aclnnAddRmsNormDynamicQuantV2",
    "ApplyRotaryPosEmb": "aclnnApplyRotaryPosEmbV2",
    "ClippedSwiglu": "aclnnClippedSwiglu",
    "DequantSwigluQuant": "aclnnDequantSwigluQuantV2",
    "DynamicQuant": "aclnnDynamicQuantV2",
    "FusedInferAttentionScore": "aclnnFusedInferAttentionScoreV3",
    "GroupedMatmul": "aclnnGroupedMatmulWeightNz",
    "GroupedMatmulSwigluQuantV2": "aclnnGroupedMatmulSwigluQuantWeightNzV2",
    "KvRmsNormRopeCache": "aclnnKvRmsNormRopeCache",
    "MlaPrologV3": "aclnnMlaPrologV3WeightNz",
    "MoeDistributeCombineV2": "aclnnMoeDistributeCombineV4",
    "MoeDistributeDispatchV2": "aclnnMoeDistributeDispatchV4",
    "MoeFinalizeRoutingV2": "aclnnMoeFinalizeRoutingV2",
    "MoeGatingTopK": "aclnnMoeGatingTopK",
    "MoeGatingTopKSoftmax": "aclnnMoeGatingTopKSoftmax",
    "MoeInitRoutingV3": "aclnnMoeInitRoutingV3",
    "QkvRmsNormRopeCache": "aclnnQkvRmsNormRopeCache",
    "RmsNorm": "aclnnRmsNorm",
    "RotaryMul": "aclnnRotaryPositionEmbeddingV2",
    "QuantBatchMatmulV3": "aclnnQuantMatmulWeightNz",
    "ScatterNdUpdate": "aclnnScatterNdUpdate",
    "ScatterPaKvCache": "aclnnScatterPaKvCache",
    "TransposeBatchMatMul": "aclnnTransposeBatchMatMul",
}
TYPES = {  # the numbers of AscendCL
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.int64: 9,
    torch.bool: 12,
    torch.bfloat16: 27,
}


def broken_rules(program: "GeProgram") -> list[str]:
    """The rules that the nodes of `program` break."""
    values = {out.source: out for node in program.nodes for out in node.outputs}
    # 4-bit weights are made from int32; torchair knows no shape of what it copies.
    origin = {f"{node.name}:0": node.inputs[0] for node in program.of("Bitcast", "TensorMove")}
    broken = []
    for node in program.of(*KERNELS):
        numbers: list[int] = []
        for listed, value in _arguments(node, values, origin):
            shape = [size if isinstance(size, int) else -1 for size in value.shape or ()]
            numbers += [listed, TYPES[value.dtype], len(shape), *shape]
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        rule = _fake.fake_broken_rule(KERNELS[node.type].encode(), array, len(numbers)).decode()
        if rule:
            broken.append(f"{node.name}: {rule}")
    return broken


def _arguments(node: "Node", values: dict[str, "Value"], origin: dict[str, str]) -> Iterator[tuple[bool, "Value"]]:
    """(whether it is a list's member, tensor) of a node's inputs and outputs. Tensors that torchair makes in place of
    absent ones have no shape here."""
    for desc, name in zip(node.proto.input_desc, node.inputs, strict=True):
        if name and not name.endswith(":-1"):
            value = values[origin.get(name, name)]
            if value.shape is not None:
                yield bool(re.fullmatch(r"\D+\d+", desc.name)) and desc.name not in ("x1", "x2", "r1", "r2"), value
    for value in node.outputs:
        yield node.type == "GroupedMatmul", value
