"""Configuration: every mistake in a file, an override or the environment is one line that names the rule."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.case import Case, ParallelSettings
from umbra.executor.config.env import NodeEnv, RankEnv, node_env, rank_env
from umbra.executor.config.load import (
    CASES,
    list_cases,
    load_case,
    load_model_config,
    make_case,
    model_folder,
    set_keys,
)
from umbra.executor.config.resolved import read_resolved, write_resolved
from umbra.executor.config.schema import key, override, section
from umbra.executor.launch.preflight import check_prompts
from umbra.tools.config_docs import config_docs


def error_of(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load_model_config(load_case(name, overrides))
    assert "\n" not in str(raised.value)
    return str(raised.value)


RANKS_8 = ["exe_mode=eager", "world_size=8"]
EAGER_8 = ["exe_mode=eager", "world_size=8", "batch_size=8"]
SHADOWS = ["offload_config.mode=elastic"]
ASCEND = ["platform=ascend", "exe_mode=ge_graph", "method=none", "batch_size=8"]
APART_8 = [*RANKS_8, "attn_tp_size=1", "moe_tp_size=1", "batch_size=8"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["max_new_token=8"], "--set max_new_token: unknown key, did you mean 'max_new_tokens'?; all keys: docs"),
        (["n_ctx=8"], "--set n_ctx: unknown key, did you mean 'data_config.max_model_len'?"),
        (["strict=1"], "strict: 1 is not true or false"),
        (["max_new_tokens=0"], "data_config.max_new_tokens: 0 must be at least 1"),
        (["top_p=1.5"], "sampling_config.top_p: 1.5 must be at most 1"),
        (["dtype=float31"], "'float31' is not one of bfloat16, float16, float32, did you mean 'float32'?"),
        (["exe_mode=ge_graph"], "exe_mode: 'ge_graph' is not one of cpu's: eager, graph"),
        (["enable_cache_compile=true"], "enable_cache_compile: true has nothing to keep on platform: cpu"),
        (['prompts=["\\ud800"]'], "data_config.prompts: ['\\ud800'] has half of a surrogate pair: not text"),
        (["temperature=1e-320"], "temperature: 1e-320 must be 0 or at least 1e-06: logits divided by less overflow"),
        (["model_path=''"], "demo.yaml: model_path is missing: name the folder of the checkpoint"),
        (["model_path=nowhere"], "nowhere is not a folder"),
        ([*RANKS_8, "attn_tp_size=3"], "attn_tp_size: 3 does not divide world_size: 8"),
        (["sequence_parallel_tokens=9"], "sequence_parallel_tokens: 9 needs a world_size above 1"),
        (
            [*RANKS_8, "sequence_parallel_tokens=65", "chunked_prefill_size=64"],
            "sequence_parallel_tokens: 65 is more than the 64 tokens of the largest prefill step: lower it, or",
        ),
        (
            [*RANKS_8, "expert_slots=5", "moe_tp_size=1"],
            "parallel_config.expert_slots: 5 needs several ranks with rows and whole experts of their own: set "
            "attn_tp_size: 1 and moe_tp_size: 1 (they are 8 and 1, world_size is 8)",
        ),
        ([*APART_8, "expert_slots=3"], "expert_slots: 3 must be from 4 to 32: 8 ranks hold the model's 32 experts"),
        ([*APART_8, "expert_slots=5", "mode=elastic"], "expert_slots: 5 and offload_config.mode: elastic exclude each"),
        (["rebalance_steps=5"], "parallel_config.rebalance_steps: has no meaning with parallel_config.expert_slots: 0"),
        (
            ["exe_mode=eager", "world_size=64", "attn_tp_size=8", "batch_size=8", "moe_tp_size=1"],
            "world_size / moe_tp_size: 64 does not divide num_experts: 32",
        ),
        ([*RANKS_8, "attn_tp_size=2", "batch_size=6"], "batch_size: 6 is not divisible by attn_dp: 4"),
        ([*EAGER_8, "attn_tp_size=2", "lmhead_tp_size=4"], "lmhead_tp_size: 4 does not divide attn_tp_size: 2"),
        (["group_size=48"], "quantization.group_size: 48 must be 32, 64 or 128"),
        (["draft_config.method=eagle3"], "with draft_config.method: eagle3: name the head's folder"),
        ([*SHADOWS, "stream_tokens=4"], "offload_config.stream_tokens: 4 must be above the 4 rows of a decode step"),
        (["interval=2"], "offload_config.interval: has no meaning with offload_config.mode: none: leave it out"),
        ([*ASCEND, *SHADOWS], "offload_config.mode: elastic needs a callback to the host"),
        ([*ASCEND, "super_kernel=true", "exe_mode=acl_graph"], "choose ge_graph or npugraph_ex, or leave it out"),
        ([*ASCEND, "static_kernels=true"], "exe_mode: ge_graph: choose npugraph_ex, or leave it out"),
        ([*ASCEND, "prefetch=true", "exe_mode=eager"], "choose ge_graph or acl_graph or npugraph_ex, or leave it out"),
        ([*ASCEND, "deterministic=true", "aiv_group=world"], "aiv_group: world exclude each other"),
        (["input_max_len=2000", "max_new_tokens=100"], "input_max_len + max_new_tokens: 2100 exceed the model's 2048"),
    ],
)
def test_impossible_values_are_named(overrides: list[str], complaint: str) -> None:
    assert complaint in error_of("demo", *overrides)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (SHADOWS, "offload_config.mode: elastic places experts, which a dense model does not have: leave it out"),
        ([*APART_8, "expert_slots=3"], "parallel_config.expert_slots: 3 places experts, which a dense model does not"),
        ([*RANKS_8, "moe_tp_size=4"], "moe_tp_size: 4 divides experts, which the model does not have"),
    ],
)
def test_settings_of_experts_are_refused_for_dense_models(overrides: list[str], complaint: str) -> None:
    assert complaint in error_of("qwen38_27b_q4_cpu", *overrides)


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model_path: [x\n", "bad.yaml: line 2, column 1 not valid YAML"),
        ("world_size: 1\nworld_size: 2\n", "bad.yaml: line 2, column 1 not valid YAML: key 'world_size' stands twice"),
        ("data_config: {promts: [x]}\n", "bad.yaml: unknown key 'data_config.promts', did you mean 'prompts'?"),
        ("model_path: !!python/object/apply:os.system ['true']\n", "bad.yaml: line 1, column 13 not valid YAML"),
        ("? [a]\n: 1\n", "bad.yaml: line 1, column 3 not valid YAML: found unhashable key"),
        ("world_size: !!int x\n", "bad.yaml: line 1, column 13 not valid YAML: 'x' cannot be read as int"),
        (f"a0: &a0 [x, x]\n{BOMB}data_config: {{prompts: *a9}}\n", "not valid YAML: more than 20,000 values"),
        (f"a: {'{a: ' * 100_000}", "bad.yaml: not valid YAML: values are nested too deeply"),
        ("? " + "k" * (1 << 20) + "\n: 1", "bad.yaml: unknown key 'kkkkk"),
        ("description: " + "x" * (3 << 20), "bad.yaml: 3.0 MB; a case file may have at most 2 MB"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    said = error_of(str(tmp_path / "bad.yaml"))
    assert complaint in said
    assert len(said) < 1000


@dataclass(frozen=True)
class Part:
    size: int = key(1, "a size")


@dataclass(frozen=True)
class Whole:
    first: Part = section(Part)
    second: Part = section(Part)


def test_a_bare_name_of_two_sections_is_ambiguous() -> None:
    with pytest.raises(UserError, match=r"^size: ambiguous, give one of first\.size, second\.size"):
        override(Whole, {}, "size", 2)
    data: dict[str, Any] = {}
    override(Whole, data, "second.size", 2)
    assert data == {"second": {"size": 2}}


def test_numbers_with_a_meaning_become_none_or_zero() -> None:
    shadows = ["offload_config.mode=fixed", "exe_mode=graph"]
    for written, read in {"0": None, "null": None, "-1": 0, "7": 7}.items():
        case = load_case("demo", [*shadows, f"slots={written}", f"max_swaps={written}", f"stream_tokens={written}"])
        offload = case.offload_config
        assert (offload.slots, offload.max_swaps, offload.stream_tokens) == (read, read, read)
    open_ = load_case("demo", ["threads=0", "top_k=0", "chunked_prefill_size=0"])
    assert (open_.threads, open_.sampling_config.top_k, open_.data_config.chunked_prefill_size) == (None, None, None)
    assert open_ == load_case("demo")
    with pytest.raises(UserError, match=r"offload_config\.slots: -2 must be at least -1"):
        load_case("demo", ["slots=-2"])
    with pytest.raises(UserError, match=r"threads: 'many' is not an integer$"):
        load_case("demo", ["threads=many"])


def test_every_shipped_case_is_valid() -> None:
    assert {name for name, _ in list_cases()} == {p.stem for p in CASES.glob("*.yaml")}
    for name, description in list_cases():
        case = load_case(name)
        load_model_config(case)  # checkpoints that are too large to ship have a config.json
        assert description
        assert not description.startswith("(broken")


def test_a_resolved_case_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    for name, _ in list_cases():
        case = load_case(name, ["drain_s=.inf", 'prompts=["naïve 你好"]'])
        write_resolved(case, path)
        assert read_resolved(path) == case
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a resolved case: "),
        ('{"threads": "x"}', "not a resolved case: Expected `int | null`, got `str`"),
        ("[" * 100_000, "not a resolved case: "),
        (" " * ((24 << 20) + 1), "larger than 24 MB, not a resolved case"),
    ],
)
def test_what_is_no_resolved_case_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "case.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/case.json: {complaint}")):
        read_resolved(tmp_path / "case.json")


def test_aliases_that_would_make_a_huge_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(f"model_path: x\ndata_config: {{prompts: [&a {'x' * (1 << 20)}{', *a' * 30}]}}")
    with pytest.raises(UserError, match="case case: its prompts have more than 24 MB together"):
        write_resolved(load_case(str(path)), tmp_path / "case.json")
    assert not (tmp_path / "case.json").exists()


def test_config_docs_are_fresh() -> None:
    for name, text in config_docs().items():
        assert (ROOT / "docs" / name).read_text() == text, "run .venv/bin/python -m umbra.tools.config_docs"


def test_the_rows_of_a_decode_step() -> None:
    def rows(*overrides: str) -> int:
        return load_case("demo", ["exe_mode=eager", *overrides]).decode_rows

    def drafts(most: int) -> tuple[str, str]:
        return "draft_config.method=lookup", f"draft_config.tokens={most}"

    assert rows("batch_size=4") == rows("batch_size=4", "draft_config.tokens=3") == 4
    assert rows("batch_size=4", *drafts(3)) == 16
    assert rows("batch_size=20", *drafts(1)) == 32  # only so many sequences get drafts
    assert rows("batch_size=8", *drafts(1), "world_size=4", "attn_tp_size=2") == 16


def test_settings_come_before_overrides_and_sizes_are_filled_in() -> None:
    data = {"model_path": "checkpoints/austen_moe", "data_config": {"prompts": ["a"]}}
    case = make_case(data, "own", "file", ["threads=3"], {"threads": 2, "prompts": ("b", "c"), "batch_size": 2})
    assert (case.name, case.threads, case.data_config.prompts, case.data_config.batch_size) == ("own", 3, ("b", "c"), 2)
    assert case.parallel_config == ParallelSettings(1, 1, 0, 1000, 1, 1)
    with pytest.raises(UserError, match=r"^case own: data_config\.prompts is empty: give at least one prompt"):
        check_prompts(make_case({"model_path": "x"}, "own", "file"))
    given: dict[str, object] = {}
    set_keys(Case, given, ["description=a=b"])
    assert given == {"description": "a=b"}


def test_a_relative_model_path_starts_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    case = load_case("demo")
    assert model_folder(case) == ROOT / "checkpoints/austen_moe"
    assert str(model_folder(dataclasses.replace(case, model_path="~/model"))) == "/somebody/model"


READ = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"]
READ += ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_rank_on_one_node() -> None:
    assert rank_env() == RankEnv(0, 1, 0, 1, "")
    assert node_env() == NodeEnv(1, 0, "", 0)


def test_what_a_launcher_sets_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(READ, ["5", "8", "1", "4", "/errors", "2", "1", "host", "29500"], strict=True):
        monkeypatch.setenv(name, value)
    assert rank_env() == RankEnv(5, 8, 1, 4, "/errors")
    assert node_env() == NodeEnv(2, 1, "host", 29500)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "one"}, "environment variable RANK='one' is not an integer"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE=0 must be at least 1"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 must be below NNODES=1"),
        ({"NNODES": "2", "MASTER_PORT": "1"}, "NNODES=2 also needs MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_impossible_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{re.escape(complaint)}"):
        _ = rank_env(), node_env()
