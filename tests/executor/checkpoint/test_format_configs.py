"""What the config of a quantised checkpoint may say: other values would be read wrong, and are refused by key."""

from copy import deepcopy
from typing import Any

import pytest

from executor.checkpoint.formats.detect import SCHEMES
from executor.checkpoint.formats.scheme import Scheme
from models.hf_config import HfConfig
from umbra.errors import UserError

INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}


def compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {"format": format, "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}


CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"version": "gemm", "bits": 4, "w_bit": 4, "zero_point": True, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq", "pack_dtype": "int32"},
    "fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]},
    "pack-quantized": compressed("pack-quantized", INTEGERS),
    "int-quantized": compressed("int-quantized", INTEGERS | {"num_bits": 8}),
    "float-quantized": compressed("float-quantized", FLOATS),
}
REFUSED: dict[str, dict[str, list[Any]]] = {
    "awq": {
        "version": ["gemv", "GEMV", 1], "bits": [3, 8, "4"], "w_bit": [8], "zero_point": [False],
        "group_size": [None, 16, -1], "modules_to_not_convert": ["gate", [1]],
    },
    "gptq": {
        "desc_act": [True, 0], "bits": [2, 3, None], "group_size": [0, 16], "sym": ["yes"], "lm_head": [1],
        "checkpoint_format": ["marlin"], "pack_dtype": ["int8"],
    },
    "fp8": {"fmt": ["e5m2"], "weight_block_size": [None, [128], [128, 64], 128]},
    "pack-quantized": {
        "num_bits": [2, None], "type": ["float"], "actorder": ["group", True], "symmetric": [1],
        "strategy": ["tensor", None], "group_size": [16, None],
    },
    "int-quantized": {"num_bits": [4]},
    "float-quantized": {
        "num_bits": [4], "type": ["int", None], "symmetric": [False], "strategy": ["channel", None],
        "block_structure": [None, [128, 64], "64x64"],
    },
}  # fmt: skip
ROWS = [(name, key, value) for name, keys in REFUSED.items() for key, values in keys.items() for value in values]


def scheme(name: str, key: str | None = None, value: object = None) -> Scheme:
    """The scheme of the config, with one key changed, which may be one of a group's weights."""
    data = deepcopy(CONFIGS[name])
    inner = data["config_groups"]["group_0"]["weights"] if "config_groups" in data else data
    if key:
        inner[key] = value
    return SCHEMES["compressed-tensors" if inner is not data else name](HfConfig(data, "config.json"))


@pytest.mark.parametrize(("name", "key", "value"), ROWS)
def test_what_would_be_read_wrong_is_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: .*{key}: "):
        scheme(name, key, value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("awq", "version", "GEMM"), ("awq", "version", None), ("gptq", "group_size", -1), ("gptq", "bits", 8),
        ("gptq", "checkpoint_format", "gptq_v2"), ("gptq", "desc_act", None), ("fp8", "fmt", "float8_e4m3fn"),
        ("pack-quantized", "actorder", "static"), ("pack-quantized", "actorder", "weight"),
        ("pack-quantized", "actorder", False), ("pack-quantized", "num_bits", 8),
        ("float-quantized", "block_structure", "128x128"),
    ],
)  # fmt: skip
def test_other_names_of_the_same_are_taken(name: str, key: str, value: Any) -> None:
    assert scheme(name, key, value).encodings


def test_each_group_of_mixed_precision_has_a_format_of_its_own() -> None:
    groups = {
        "experts": {"format": "pack-quantized", "weights": INTEGERS, "targets": [r"re:.*experts.*"]},
        "others": {"format": "float-quantized", "weights": FLOATS, "targets": ["Linear"]},
    }
    data = {"format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    mixed = SCHEMES["compressed-tensors"](HfConfig(data, "config.json"))
    experts, others = mixed.encodings
    assert mixed.said("model.layers.0.mlp.experts.1.up_proj") is experts
    assert mixed.said("model.layers.0.self_attn.q_proj") is others
    assert mixed.said("lm_head") is None
    del groups["others"]["format"]
    with pytest.raises(UserError, match=r"format: 'mixed-precision' must be one of pack-quantized"):
        SCHEMES["compressed-tensors"](HfConfig(data, "config.json"))
