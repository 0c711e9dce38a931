"""What the report about a checkpoint says of facts that are given, line by line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ops.format import Format
from umbra.commands import inspect_checkpoint as module
from umbra.commands.inspect_checkpoint import (
    Component,
    Excluded,
    components_of,
    encodings_of,
    excluded_from,
    flat,
    in_words,
    inspect_checkpoint,
    model_type,
    plain_case,
    print_facts,
    print_rank,
    shown,
)
from umbra.errors import UserError
from umbra.files import ROOT

FACTS: dict[str, Any] = {
    "checkpoint": "folder",
    "architecture": {
        "model_type": "some", "parameters": 1234567, "layers": 2, "rope": {"theta": 1e4, "kinds": ("a", "b")},
        "sparse": (True, False, True), "none": (), "odd": (True, 1),
    },
    "quantization": {
        "title": "a format", "encoding": "e4", "bits": 4, "modules": 1500, "kept_by": ["cpu", "ascend"],
        "mixed_with": [{"encoding": "e8", "modules": 2, "kept_by": []}],
        "excluded": [
            {"pattern": "a.*.gate", "of": 2000, "modules": ["x"] * 2000},
            {"pattern": "b.*", "of": 3, "modules": ["b.0", "b.2"]},
        ],
        "contradictions": ["c.0"],
    },
    "components": [
        {"name": "experts", "tensors": 1000, "nbytes": 1 << 30, "types": {"F32": 1, "BF16": 1999}},
        {"name": "norms", "tensors": 2, "nbytes": 512 << 20, "types": {}},
    ],
    "total": {"tensors": 1002, "tensor_nbytes": 3 << 29, "files": 1001, "file_nbytes": 1610612800},
    "problems": [{"problem": "tensors missing", "names": ["m", "n"]}],
}  # fmt: skip


def test_facts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts(FACTS)
    assert capsys.readouterr().out == (
        "folder: some, 1,234,567 parameters\n"
        "  layers                             2\n"
        "  rope.theta                         10000.0\n"
        "  rope.kinds                         a, b\n"
        "  sparse                             2 of 3\n"
        "  none                               \n"
        "  odd                                True, 1\n"
        "\n"
        "quantisation: a format\n"
        "  1,500 modules in e4: kept as they are on cpu, ascend\n"
        "  2 modules in e8: read as floats on every platform\n"
        "  not quantised: a.*.gate (2,000 of 2,000)\n"
        "  not quantised: b.* (2 of 3: b.0, b.2)\n"
        "\n"
        "component     tensors      bytes on disk              types\n"
        "experts         1,000      1,073,741,824    1.000 GB  1,999 BF16, 1 F32\n"
        "norms               2        536,870,912    0.500 GB\n"
        "total           1,002      1,610,612,736    1.500 GB\n"
        "1,001 file(s) of 1,610,612,800 bytes with headers. 1 GB = 2^30 bytes.\n"
        "\n"
        f"warning: 1 {module.CONTRADICTION}: c.0\n"
        "problem: 2 tensors missing: m, n\n"
    )


def test_facts_without_flaws_and_with_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    rank = {
        "case": "demo", "platform": "cpu", "ranks": 3, "linear_format": "q8", "head_format": "q4",
        "weights": {"experts": 1 << 30, "norms": 5}, "weights_nbytes": (1 << 30) + 5, "kv_cache_nbytes": 1 << 29,
        "kv_cache": "2 x 3",
    }  # fmt: skip
    plain = {"title": "unquantised", "bits": 0, "mixed_with": [], "excluded": [], "contradictions": []}
    print_facts(FACTS | {"quantization": plain, "problems": [], "rank": rank})
    out = capsys.readouterr().out
    assert "\nquantisation: unquantised\n\ncomponent" in out
    assert "warning" not in out
    said = (
        "\ncase demo: cpu, 3 rank(s)\n"
        "  linear layers in q8, head in q4\n"
        "Each rank keeps, counted, not measured:\n"
        "  experts                   1,073,741,824    1.000 GB\n"
        "  norms                                 5    0.000 GB\n"
        "weights                     1,073,741,829    1.000 GB\n"
        "KV cache                      536,870,912    0.500 GB  2 x 3\n"
    )
    assert out.endswith(f"\ncomplete: every tensor is known, every weight of the model is there\n{said}")
    print_rank(rank)
    assert capsys.readouterr().out == said


def test_values_in_flat_keys() -> None:
    assert list(flat({"a": {"b": {"c": 1}}, "d": None}, "x.")) == [("x.a.b.c", "1"), ("x.d", "None")]


def test_names_cannot_control_a_terminal() -> None:
    assert shown(["a" * 500, "\x1b[2J"]) == f"{'a' * 200}, '\\x1b[2J'"


def test_formats_in_words() -> None:
    assert in_words(Format("bf16")) == "bf16"
    assert in_words(Format("q4", 64, zeros=True)) == "q4 in groups of 64 with zero points"
    assert in_words(Format("q8", 32)) == "q8 in groups of 32"


def test_components_are_sums_of_their_tensors() -> None:
    headers = {"a": ((3, 4), "F32"), "b": ((6,), "F4"), "c": ((2, 2), "BF16"), "d": ((), "F32")}
    files: Any = SimpleNamespace(place=headers, header=headers.__getitem__)
    assert components_of(files, {"a": "norms", "b": "norms", "c": "embedding"}) == [
        Component("embedding", 1, 8, {"BF16": 1}),
        Component("norms", 2, 51, {"F32": 1, "F4": 1}),
        Component("unknown", 1, 4, {"F32": 1}),
    ]


class Encoding(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def linear(*names: str) -> Any:
    return {f"{name}.weight": [SimpleNamespace(linear="norm" not in name)] for name in names}


def test_encodings_and_who_keeps_them() -> None:
    four = Encoding(title="four", bits=4, group=32, zeros=True, format=Format("q4", 32, zeros=True))
    eight = Encoding(title="eight", bits=8, group=64, zeros=False, format=Format("q8", 64))
    floats = Encoding(title="floats", bits=8, group=0, zeros=False, format=None)
    wanted = linear("a", "b", "c", "norm")
    scheme: Any = SimpleNamespace(
        encodings=(four, eight, floats), encoding=lambda module: {"a": eight, "b": floats, "c": eight}.get(module)
    )
    assert encodings_of(scheme, wanted) == [
        {
            "encoding": "four", "bits": 4, "group_size": 32, "zero_points": True, "modules": 0,
            "kept_by": ["cpu", "ascend"],
        },
        {"encoding": "eight", "bits": 8, "group_size": 64, "zero_points": False, "modules": 2, "kept_by": ["cpu"]},
        {"encoding": "floats", "bits": 8, "group_size": 0, "zero_points": False, "modules": 1, "kept_by": []},
    ]  # fmt: skip


def test_modules_that_stay_in_floats_are_grouped() -> None:
    names = ("layers.0.gate", "layers.1.gate", "layers.0.up.3.x", "head.7", "layers.1.norm")
    scheme: Any = SimpleNamespace(
        encodings=(), encoding=lambda module: None if "gate" in module or "1" in module else 1
    )
    assert excluded_from(scheme, linear(*names)) == []
    scheme.encodings = (1,)
    assert excluded_from(scheme, linear(*names)) == [
        Excluded("layers.*.gate", 2, ["layers.0.gate", "layers.1.gate"]),
    ]
    scheme.encoding = lambda module: None if module in ("head.7", "layers.1.gate", "layers.0.up.3.x") else 1
    assert excluded_from(scheme, linear(*names)) == [
        Excluded("layers.*.gate", 2, ["layers.1.gate"]),
        Excluded("layers.*.up.*.x", 1, ["layers.0.up.3.x"]),
        Excluded("head.7", 1, ["head.7"]),
    ]


def test_a_case_with_every_weight() -> None:
    case = plain_case(ROOT / "checkpoints/austen_moe")
    sizes = case.parallel_config
    assert (case.name, case.model_name, case.world_size) == ("inspect", "qwen3_moe", 1)
    assert case.model_path == str(ROOT / "checkpoints/austen_moe")
    assert (sizes.attn_tp_size, sizes.moe_tp_size, sizes.embed_tp_size, sizes.lmhead_tp_size) == (1, 1, 1, 1)
    assert (case.data_config.input_max_len, case.data_config.max_new_tokens) == (1, 1)
    assert (case.quantization.method, case.cache_config.page_size) == ("none", 1)
    with pytest.raises(UserError, match=r"docs is no checkpoint: it holds no config\.json: name the folder that does$"):
        model_type(ROOT / "docs")


def test_a_report_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Any = []
    monkeypatch.setattr(module, "inspect", lambda folder: {"of": folder})
    monkeypatch.setattr(module, "inspect_rank", lambda case: case.model_path)
    monkeypatch.setattr(module, "print_facts", lambda facts: done.append(dict(facts)))
    monkeypatch.setattr(module, "write_json", lambda *given: done.append(given))
    inspect_checkpoint(tmp_path, None, [], None)
    assert done == [{"of": tmp_path}]
    inspect_checkpoint(tmp_path, "demo", ["threads=2"], tmp_path / "json")
    facts = {"of": tmp_path, "rank": str(tmp_path)}
    assert done[1:] == [facts, (tmp_path / "json", facts)]
    with pytest.raises(UserError, match=r"^--set a=1: there is no case to set it in: give --case as well$"):
        inspect_checkpoint(tmp_path, None, ["a=1"], None)
