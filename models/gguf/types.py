"""The types of tensors in GGUF files: how many columns of a row one block has, and its bytes."""

from typing import NamedTuple


class GgmlType(NamedTuple):
    name: str
    columns: int
    nbytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    30: GgmlType("BF16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    39: GgmlType("MXFP4", 32, 17),
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
FLOATS = ("F32", "F16", "BF16")  # also safetensors' names of them
NOT_READ = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}
FIRST_OF_IK = 97  # from here on, types that only ik_llama.cpp has


def name_of(id: int) -> str:
    """The name of any type, for messages."""
    if id in TYPES:
        return TYPES[id].name
    return NOT_READ.get(id, f"{id}, one of ik_llama.cpp's own" if id >= FIRST_OF_IK else f"{id}, unknown")
