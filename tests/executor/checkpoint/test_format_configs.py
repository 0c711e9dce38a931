"""Files, configs and patterns that are refused because they would be read wrong or take long."""

import re
import time
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.detect import SCHEMES
from umbra.executor.checkpoint.formats.patterns import inside, pattern, target
from umbra.executor.checkpoint.formats.scheme import Scheme
from umbra.models.hf_config import HfConfig

INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}


def compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {"format": format, "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}


CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"version": "gemm", "bits": 4, "w_bit": 4, "zero_point": True, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq", "pack_dtype": "int32"},
    "auto-round": {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_awq"},
    "fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]},
    "pack-quantized": compressed("pack-quantized", INTEGERS),
    "int-quantized": compressed("int-quantized", INTEGERS | {"num_bits": 8}),
    "float-quantized": compressed("float-quantized", FLOATS),
}
REFUSED: dict[str, dict[str, list[Any]]] = {
    "awq": {
        "version": ["gemv"],
        "bits": [8],
        "w_bit": [8],
        "zero_point": [False],
        "group_size": [None, 16],
        "modules_to_not_convert": ["gate"],
    },
    "gptq": {
        "desc_act": [1],
        "bits": [2],
        "dynamic": [{"+:a": {"bits": 3}}, {"+:a": 1}, {"a" * i: {} for i in range(1001)}],
        "group_size": [16],
        "sym": ["yes"],
        "lm_head": [1],
        "checkpoint_format": ["marlin"],
        "pack_dtype": ["int8"],
    },
    "auto-round": {
        "packing_format": [None, "mlx"],
        "bits": [2, 8],
        "data_type": ["mx_fp"],
        "act_bits": [8],
        "super_bits": [6],
        "rotation_config": [{"a": 1}],
        "extra_config": [{"a": {"bits": 3}}, {"(a": {}}, {"a": []}],
    },
    "fp8": {"fmt": ["e5m2"], "weight_block_size": [None, [128, 64]]},
    "pack-quantized": {
        "num_bits": [2],
        "type": ["float"],
        "actorder": ["x"],
        "symmetric": [1],
        "strategy": ["tensor"],
        "group_size": [16],
    },
    "int-quantized": {"num_bits": [4]},
    "float-quantized": {
        "num_bits": [4],
        "type": ["int"],
        "symmetric": [False],
        "strategy": ["group"],
        "block_structure": [[128, 64]],
    },
}
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


@pytest.mark.parametrize("more", [{"static_groups": True}, {"meta": {"static_groups": True}}, {"group_size": -1}])
def test_an_order_of_groups_that_changes_nothing(more: dict[str, Any]) -> None:
    data = CONFIGS["gptq"] | {"desc_act": True}
    formats = [SCHEMES["gptq"](HfConfig(d, "config.json")).encodings[0].format for d in (data, data | more)]
    assert [format and format.kind for format in formats] == ["q8", "q4"]


PATHS = ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"]
PATHS += ["model.layers.61.block_sparse_moe.gate", "model.layers.61.block_sparse_moe.experts.255.w1"]
PATHS += ["model.layers.61.mlp.experts.17.gate_proj"]
TAKEN = [(r".*block_sparse_moe.gate$", {3}), (r".*\.gate\b", {3}), (r".*self_attn\.(q|k|v|o)_proj$", {1, 2})]
TAKEN += [(r".*(gate|e_score).*", {3, 5}), (r"(?:lm_head|model\.layers\.\d+\.(self_attn|mlp)\.).*", {0, 1, 2, 5})]
TAKEN += [(r".*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$", {4})]


@pytest.mark.parametrize(("text", "matches"), TAKEN)
def test_patterns_of_published_configs(text: str, matches: set[int]) -> None:
    assert {i for i, path in enumerate(PATHS) if target(f"re:{text}", "here")(path)} == matches


PATTERNS = [
    "(a+)+$",
    "(a|b)*",
    ".**",
    "(?=a)",
    r"(a)\1",
    "(a",
    "x" * 201,
    ".*" * 5,
    "(a|b)" * 6,
    "|".join("a" * 40),
    "a{1000}",
]


@pytest.mark.parametrize("text", PATTERNS)
def test_what_could_take_long_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="here: pattern ") as raised:
        pattern(text, "here")
    assert len(str(raised.value)) < 250


@given(st.text(alphabet="ab.*+?()|[]\\dwb$^:-{2}", max_size=60))
def test_any_pattern_is_refused_or_means_the_same_as_to_re(text: str) -> None:
    start = time.process_time()
    try:
        matches = pattern(text, "here")
    except UserError:
        return
    for path in ("a" * 60, "ab." * 20, "model.layers.0.b"):
        assert bool(matches(path)) == bool(re.match(text, path))
    assert time.process_time() - start < 20


def test_names_are_whole_parts_of_a_path() -> None:
    gate = inside(["gate", "model.layers.0."])
    assert gate("model.layers.7.block_sparse_moe.gate")
    assert gate("model.layers.0.self_attn.q_proj")
    for other in ("gate_proj", "agate", "gate2.x", "model.layers.00.x", "model.layers.10"):
        assert not gate(f"model.layers.7.mlp.{other}")
    assert not inside([])("lm_head")
