"""Loading proves completeness: whatever is missing, extra, misshapen, damaged or hostile is one line."""

import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_runner, oracle_logits, save_tiny, tiny_case
from umbra.base.errors import UserError
from umbra.base.files import read_json
from umbra.commands.logits import collect_logits
from umbra.executor.checkpoint.formats.scheme import Unquantised
from umbra.executor.checkpoint.load import load_checkpoint
from umbra.models.causal_lm import CausalLM

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def resave(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load_error(tmp_path: Path) -> str:
    with pytest.raises(UserError) as raised:
        make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


CHANGES: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: [t.pop(EXPERT), t.pop("model.norm.weight")], f"2 tensors missing: {EXPERT}, model.norm.weight"),
    (lambda t: t.update({"model.layers.9.x": torch.zeros(2)}), "that the model does not know: model.layers.9.x"),
    (lambda t: t.update({EXPERT: torch.zeros(16, 31)}), f"{EXPERT} has shape [16, 31], expected [16, 32]"),
    (lambda t: t.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}), f"{EXPERT} has type I8, expected one of"),
]


@pytest.mark.parametrize(("change", "complaint"), CHANGES)
def test_what_is_missing_or_unknown_or_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], complaint: str
) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", change)
    assert complaint in load_error(tmp_path)


def test_rotary_frequencies_of_older_tools_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    resave(tmp_path / "model", lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)


def test_values_that_are_not_finite_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model", tie_word_embeddings=True)
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    assert "warning" not in capsys.readouterr().out
    resave(
        tmp_path / "model",
        lambda t: [t[EXPERT][3].fill_(math.nan), t["model.embed_tokens.weight"][:, 1].fill_(math.inf)],
    )
    make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "model: 2 tensors hold NaN or infinite values: " in lines[0]
    assert EXPERT in lines[0]
    assert "model.embed_tokens.weight" in lines[0]


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        (
            {"hidden_size": 1 << 23},
            r"GB of weights, .* GB of KV cache and .* on each of 1 rank\(s\) do not fit into the",
        ),
        ({"num_experts": 10**7}, "num_experts: 10000000 must be an integer from 0 to 65536"),
    ],
)
def test_random_weights_of_absurd_sizes_are_refused_by_count(
    tmp_path: Path, size: dict[str, int], complaint: str
) -> None:
    save_tiny(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | size))
    case = tiny_case(tmp_path, tmp_path / "model", model_config={"dtype": "float32", "with_ckpt": False})
    with pytest.raises(UserError, match=complaint):
        make_runner(case, tmp_path)


def test_sharded_checkpoint_loads(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    arrays = collect_logits(make_runner(tiny_case(tmp_path, tmp_path / "model"), tmp_path), [[3, 4, 5]], steps=0)
    np.testing.assert_allclose(arrays["prefill_0"], oracle_logits(oracle, [3, 4, 5]).numpy(), atol=1e-4)


def test_index_that_misplaces_a_tensor_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = sorted(set(data["weight_map"].values()))
    file = data["weight_map"]["model.norm.weight"]
    data["weight_map"]["model.norm.weight"] = next(f for f in files if f != file)
    index.write_text(json.dumps(data))
    assert "not in the file the index names: model.norm.weight" in load_error(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", max_shard_size="20KB")
    paths = sorted((tmp_path / "model").glob("*.safetensors"))
    save_file(load_file(paths[0]) | load_file(paths[1]), paths[0])
    assert "is also in" in load_error(tmp_path)


SINGLE = "model.safetensors"
BODY = bytes(64)
DEEP = 100_000


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    save_tiny(folder / "model", num_hidden_layers=1)
    return folder / "model"


@pytest.fixture(scope="module")
def model(valid: Path) -> CausalLM:
    module = make_runner(tiny_case(valid.parent, valid), valid.parent).engine.model
    assert isinstance(module, CausalLM)
    return module


def complaint_of(model: CausalLM, folder: Path) -> str:
    """The error text of loading `folder`; also checks that the refusal takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as raised:
        load_checkpoint(model, folder, Unquantised(), model.ignores, progress=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KB
    return one_line(raised.value)


def one_line(error: UserError) -> str:
    text = str(error)
    assert text.isprintable()
    assert len(text) < 3000
    return text


def tensor(**changes: Any) -> dict[str, Any]:
    """An entry of a header whose tensor fills BODY."""
    return {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} | changes


def with_header(header: object, body: bytes = BODY, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


HALF = {"first": tensor(shape=[8], data_offsets=[0, 32])}
ENTRY = json.dumps(tensor()).encode()
FILES = {
    "cut in its header": (with_header({"a": tensor()})[:40], "its header should have "),
    "cut in its tensors": (with_header({"tail": tensor()})[:-1], "tensor tail ends at byte 64 of 63"),
    "header of terabytes": (with_header({}, length=1 << 42), "its header should have 4398046511104 bytes"),
    "deep lists": (with_header(b"[" * DEEP + b"]" * DEEP), ""),
    "NaN for an entry": (with_header({"bad": math.nan}), "tensor bad must have dtype, shape and data_offsets, not nan"),
    "overlap": (with_header(HALF | {"b": tensor(shape=[12], data_offsets=[16, 64])}), "b begins at byte 16, where 32"),
    "bytes of no tensor": (with_header(HALF), "64 bytes of tensors, but the header tells of 32"),
    "offsets beyond": (with_header({"far": tensor(shape=[32], data_offsets=[0, 128])}), "far ends at byte 128 of 64"),
    "negative shape": (with_header({"bad": tensor(shape=[-4, -4])}), "tensor bad has shape [-4, -4]"),
    "product over 64 bits": (with_header({"bad": tensor(shape=[1 << 62, 4, 16])}), "tensor bad has type F32 and shape"),
    "type of another kind": (with_header({"bad": tensor(dtype=["F32"])}), "tensor bad has type ['F32'], which is none"),
    "a name twice": (with_header(b'{"twin":' + ENTRY + b',"twin":' + ENTRY + b"}"), "twin stands twice in the header"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_file_is_one_line(model: CausalLM, tmp_path: Path, name: str) -> None:
    content, complaint = FILES[name]
    (tmp_path / SINGLE).write_bytes(content)
    said = complaint_of(model, tmp_path)
    assert said.startswith(f"{tmp_path / SINGLE}: truncated or corrupt: ")
    assert complaint in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": [' + "[]," * 600_000 + "0]}", "more than 524288 values"),
        ('{"a": "' + "x" * (1 << 20) + '\U0001f642"}', "larger than 1 MB, and with other characters than ASCII"),
        ('{"a": "' + "x" * (25 << 20) + '"}', "larger than 24 MB, not a config file"),
    ],
)
def test_json_that_would_take_much_memory_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=complaint):
        read_json(tmp_path / "config.json")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KB
