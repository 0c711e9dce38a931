"""The types of tensors in GGUF files: how many columns of a row one block has, and its bytes."""

from umbra.ops.formats import SPECS
from umbra.ops.formats.spec import BlockType

_FLOATS = BlockType("F32", 0, 1, 4), BlockType("F16", 1, 1, 2), BlockType("BF16", 30, 1, 2)
TYPES = {type.number: type for type in (*_FLOATS, *(type for spec in SPECS.values() for type in spec.block_types))}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
FLOATS = tuple(type.name for type in _FLOATS)  # also safetensors' names of them
NOT_READ = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
}
FIRST_OF_IK = 97  # from here on, types that only ik_llama.cpp has


def name_of(id: int) -> str:
    """The name of any type, for messages."""
    if id in TYPES:
        return TYPES[id].name
    return NOT_READ.get(id, f"{id}, one of ik_llama.cpp's own" if id >= FIRST_OF_IK else f"{id}, unknown")
