"""Any downloaded checkpoint either loads, or is refused in one line that names the file and its fault."""

import json
import math
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.formats.scheme import Unquantised
from executor.checkpoint.load import load_checkpoint
from models.causal_lm import CausalLM
from tests.tiny import make_runner, save_tiny, tiny_case
from umbra.errors import UserError
from umbra.files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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
    "empty": (b"", "its header should have 0 bytes, the file has 0"),
    "cut in its header": (with_header({"a": tensor()})[:40], "its header should have "),
    "cut in its tensors": (with_header({"tail": tensor()})[:-1], "tensor tail ends at byte 64 of 63"),
    "header of terabytes": (with_header({}, length=1 << 42), "its header should have 4398046511104 bytes"),
    "header beyond the file": (with_header({}, length=67), "its header should have 67 bytes, the file has 74"),
    "not JSON": (with_header(b"{nope}"), "Expecting property name"),
    "not UTF-8": (with_header(b'{"\xff": ' + ENTRY + b"}"), "codec can't decode"),
    "a list": (with_header([]), "its header must be a JSON object"),
    "deep lists": (with_header(b"[" * DEEP + b"]" * DEEP), ""),
    "metadata of numbers": (with_header({"__metadata__": {"a": 1}, "w": tensor()}), "invalid type: integer `1`"),
    "NaN for an entry": (with_header({"bad": math.nan}), "tensor bad must have dtype, shape and data_offsets, not nan"),
    "overlap": (with_header(HALF | {"b": tensor(shape=[12], data_offsets=[16, 64])}), "b begins at byte 16, where 32"),
    "the same bytes twice": (with_header({"a": tensor(), "b": tensor()}), "tensor b begins at byte 0, where 64"),
    "bytes of no tensor": (with_header(HALF), "64 bytes of tensors, but the header tells of 32"),
    "offsets beyond": (with_header({"far": tensor(shape=[32], data_offsets=[0, 128])}), "far ends at byte 128 of 64"),
    "offsets unlike the shape": (with_header({"bad": tensor(shape=[15])}), "F32 and shape [15], but offsets [0, 64]"),
    "negative offsets": (with_header({"bad": tensor(data_offsets=[-64, 0])}), "tensor bad has data_offsets [-64, 0]"),
    "negative shape": (with_header({"bad": tensor(shape=[-4, -4])}), "tensor bad has shape [-4, -4]"),
    "product over 64 bits": (with_header({"bad": tensor(shape=[1 << 62, 4, 16])}), "tensor bad has type F32 and shape"),
    "unknown type": (with_header({"bad": tensor(dtype="F31")}), "tensor bad has type 'F31', which is none"),
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


INDEXES: dict[str, tuple[object, str]] = {
    "a list": ([], "must hold a JSON object"),
    "no map": ({}, "weight_map must map tensor names to file names"),
    "a number for a file": ({"weight_map": {"a": 1}}, "weight_map must map tensor names to file names"),
    "the folder above": ({"weight_map": {"a": "../x.safetensors"}}, "'../x.safetensors' is not the name of a"),
    "an absolute path": ({"weight_map": {"a": "/x.safetensors"}}, "'/x.safetensors' is not the name of a"),
    "a file of megabytes": (
        {"weight_map": {"a": "x" * (1 << 22) + ".safetensors"}},
        f"'{'x' * 79} is not the name of a .safetensors file",
    ),
}
SHARDS = {
    "absent": "gone.safetensors",
    "a zero byte": "\0.safetensors",
    "half a character": "\ud800.safetensors",
    "a folder": "folder.safetensors",
}


@pytest.mark.parametrize("name", INDEXES)
def test_bad_index_is_one_line(model: CausalLM, tmp_path: Path, name: str) -> None:
    content, complaint = INDEXES[name]
    (tmp_path / INDEX).write_text(json.dumps(content))
    said = complaint_of(model, tmp_path)
    assert said.startswith(f"{tmp_path / INDEX}: ")
    assert complaint in said


def test_two_spellings_of_one_tensor_are_one_line(tmp_path: Path) -> None:
    names = ["a.mlp.\x1b[2J" + "x" * 5000, "a.block_sparse_moe.\x1b[2J" + "x" * 5000]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax_m2"}))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "x.safetensors")}))
    with pytest.raises(UserError, match="are two names of one tensor of the model") as raised:
        read_scheme(tmp_path)
    assert one_line(raised.value).startswith(f"{tmp_path / INDEX}: a.mlp.")


@pytest.mark.parametrize("name", SHARDS)
def test_shard_that_is_no_file_is_one_line(model: CausalLM, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[name]}}))
    assert re.match(rf"{tmp_path}/.+\.safetensors(:| does not exist)", complaint_of(model, tmp_path))


@pytest.mark.parametrize("text", ["{", "[" * DEEP, '{"a":' * DEEP, '{"a": NaN', '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_unreadable_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as raised:
        read_json(tmp_path / INDEX)
    assert one_line(raised.value).startswith(f"{tmp_path / INDEX}: not readable as JSON")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": [' + "[]," * 600_000 + "0]}", "more than 524288 values"),
        ('{"a": [' + '{"b":0},' * 300_000 + "0]}", "more than 524288 values"),
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
