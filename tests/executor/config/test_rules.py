"""The rules between keys, at their boundaries, and what a case derives from its keys."""

import dataclasses

import pytest

from executor.config.case import Case, ParallelSettings
from executor.config.load import load_case, make_case, model_folder, set_keys
from umbra.errors import UserError
from umbra.files import ROOT

EAGER_8 = ["exe_mode=eager", "world_size=8", "batch_size=8"]
SHADOWS = ["offload_config.mode=elastic"]
ASCEND = ["platform=ascend", "exe_mode=ge_graph", "method=none", "batch_size=8"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["temperature=0"],
        ["temperature=1e-6"],
        [*EAGER_8, "sequence_parallel_tokens=64", "chunked_prefill_size=64"],
        [*EAGER_8, "attn_tp_size=2", "embed_tp_size=2", "lmhead_tp_size=1"],
        [*EAGER_8, "attn_tp_size=1", "moe_tp_size=1", "expert_slots=5", "rebalance_steps=7"],
        ["method=q4", "zero_points=true"],
        ["page_size=2"],
        [*SHADOWS, "stream_tokens=5"],
        [*SHADOWS, "stream_tokens=-1"],
        [*SHADOWS, "offload_config.mode=fixed", "slots=-1"],
        ["prompts=[]", "with_ckpt=false"],
        [*ASCEND, "base_port=1024"],
        [*ASCEND, "super_kernel=true"],
        [*ASCEND, "static_kernels=true", "exe_mode=npugraph_ex"],
        [*ASCEND, "prefetch=true", "exe_mode=acl_graph"],
        [*ASCEND, "method=auto"],
        [*ASCEND, "dtype=float16"],
        [*ASCEND, "enable_cache_compile=true"],
        [*ASCEND, *SHADOWS, "exe_mode=acl_graph"],
        [*ASCEND, "world_size=8", "attn_tp_size=4", "attn_tp_buffer_mb=9", "lmhead_tp_buffer_mb=9"],
    ],
)
def test_what_is_just_possible(overrides: list[str]) -> None:
    assert load_case("demo", overrides).name == "demo"


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ([*EAGER_8, "moe_tp_size=3"], "parallel_config.moe_tp_size: 3 does not divide world_size: 8"),
        ([*EAGER_8, "attn_tp_size=2", "lmhead_tp_size=4"], "lmhead_tp_size: 4 does not divide attn_tp_size: 2"),
        ([*EAGER_8, "attn_tp_size=1", "moe_tp_size=2", "expert_slots=5"], "(they are 1 and 2, world_size is 8)"),
        (["group_size=48"], "quantization.group_size: 48 must be 32, 64 or 128"),
        (["page_size=1"], "cache_config.page_size: 1 must be even on platform: cpu"),
        ([*SHADOWS, "stream_tokens=4"], "offload_config.stream_tokens: 4 must be above the 4 rows of a decode step"),
        (["interval=2"], "offload_config.interval: has no meaning with offload_config.mode: none: leave it out"),
        ([*ASCEND, *SHADOWS], "offload_config.mode: elastic needs a callback to the host"),
        ([*ASCEND, "base_port=1023"], "ascend_config.base_port: 1023 is the system's"),
        ([*ASCEND, "super_kernel=true", "exe_mode=acl_graph"], "choose ge_graph or npugraph_ex, or leave it out"),
        ([*ASCEND, "static_kernels=true"], "exe_mode: ge_graph: choose npugraph_ex, or leave it out"),
        ([*ASCEND, "prefetch=true", "exe_mode=eager"], "choose ge_graph or acl_graph or npugraph_ex, or leave it out"),
        ([*ASCEND, "deterministic=true", "aiv_group=world"], "aiv_group: world exclude each other"),
    ],
)
def test_what_is_just_impossible(overrides: list[str], error: str) -> None:
    with pytest.raises(UserError) as caught:
        load_case("demo", overrides)
    assert error in str(caught.value)


def test_the_rows_of_a_decode_step() -> None:
    def rows(*overrides: str) -> int:
        return load_case("demo", ["exe_mode=eager", *overrides]).decode_rows

    assert rows("batch_size=4") == 4
    assert rows("batch_size=4", "draft_tokens=3") == 16
    assert rows("batch_size=16", "draft_tokens=3") == 64
    assert rows("batch_size=20", "draft_tokens=1") == 32  # only so many sequences get drafts
    assert rows("batch_size=100", "draft_tokens=3") == 100
    assert rows("batch_size=8", "draft_tokens=1", "world_size=4", "attn_tp_size=2") == 16


def test_settings_come_before_overrides_and_sizes_are_filled_in() -> None:
    data = {"model_path": "checkpoints/austen_moe", "data_config": {"prompts": ["a"]}}
    case = make_case(data, "own", "file", ["threads=3"], {"threads": 2, "prompts": ("b", "c"), "batch_size": 2})
    assert (case.name, case.threads, case.data_config.prompts, case.data_config.batch_size) == ("own", 3, ("b", "c"), 2)
    assert case.parallel_config == ParallelSettings(1, 1, 0, 1000, 1, 1)
    with pytest.raises(UserError, match=r"^file: data_config\.prompts is empty"):
        make_case({"model_path": "x"}, "own", "file")
    given: dict[str, object] = {}
    set_keys(Case, given, ["description=a=b"])
    assert given == {"description": "a=b"}


def test_a_relative_model_path_starts_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    case = load_case("demo")
    assert model_folder(case) == ROOT / "checkpoints/austen_moe"
    assert str(model_folder(dataclasses.replace(case, model_path="~/model"))) == "/somebody/model"
