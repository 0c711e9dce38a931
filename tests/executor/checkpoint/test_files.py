"""What is read of a checkpoint's files, what a load counts and warns of, and how packed weights are filled in."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.checkpoint import files as reading
from executor.checkpoint import load as loading
from executor.checkpoint import packed
from executor.checkpoint.files import CheckpointFiles
from executor.checkpoint.packed import PackedCache
from umbra.errors import UserError


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tensors_and_parts_of_them_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(12.0).view(3, 4)
    files = CheckpointFiles(saved(tmp_path / "a", w=values, b=torch.ones(5, dtype=torch.bfloat16)), {"w": "ours"})
    assert "ours" in files
    assert "w" not in files
    assert (files.header("ours"), files.header("b")) == (((3, 4), "F32"), ((5,), "BF16"))
    assert [files.nbytes(name) for name in ("ours", "b", "none")] == [48, 10, 0]
    assert files.read == 0
    part = files("ours", slice(1, 3), slice(0, 2))
    assert part.tolist() == [[4, 5], [8, 9]]
    files("b", slice(0, 5))
    assert files.read == 16 + 10
    monkeypatch.setattr(reading, "MAPPED", 26)
    files.relieve()
    assert files._maps
    monkeypatch.setattr(reading, "MAPPED", 25)
    files.relieve()
    assert (files._maps, files._mapped, files.read) == ({}, 0, 26)
    assert files("ours", slice(0, 1)).tolist() == [[0, 1, 2, 3]]  # mapped again


def test_tensors_are_where_the_index_says(tmp_path: Path) -> None:
    def indexed(**places: str) -> CheckpointFiles:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return CheckpointFiles(tmp_path, {})

    one, two = torch.ones(1), torch.ones(2)
    save_file({"a": one, "b": two}, tmp_path / "x.safetensors")
    save_file({"c": one}, tmp_path / "y.safetensors")
    files = indexed(a="x.safetensors", b="x.safetensors", c="y.safetensors")
    assert {name: path.name for name, path in files.place.items()} == {
        "a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"index\.json: tensors that are not in the file the index names: a, d$"):
        indexed(a="y.safetensors", b="x.safetensors", c="y.safetensors", d="x.safetensors")
    save_file({"a": one}, tmp_path / "z.safetensors")
    with pytest.raises(UserError, match=r"z\.safetensors: tensor a is also in x\.safetensors$"):
        indexed(a="x.safetensors", z="z.safetensors")
    with pytest.raises(UserError, match=r"w\.safetensors does not exist, but the checkpoint's index names it$"):
        indexed(a="w.safetensors")
    with pytest.raises(
        UserError, match=r"^model_path: .*none holds neither model\.safetensors nor model\.safetensors\.i"
    ):
        CheckpointFiles(tmp_path / "none", {})


class Bar:
    """A bar that notes what it is told."""

    def __init__(self, total: int, shown: bool):
        self.total, self.shown, self.n = total, shown, 0
        self.updates: list[int] = []

    def update(self, count: int) -> None:
        self.n += count
        self.updates.append(count)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None: ...


def test_a_load_fills_each_piece_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = torch.tensor([1.0, float("inf")])
    folder = saved(tmp_path / "a", w=torch.arange(8.0).view(4, 2), bad=bad, known=bad.clone())
    filled: list[Any] = []
    bars: Any = []

    def piece(name: str, shape: tuple[int, ...], kept: int, says: Any, part: Any) -> Any:
        def fill(values: torch.Tensor) -> Any:
            filled.append((name, values.tolist()))
            return says

        return SimpleNamespace(
            name=name, shape=shape, kept_elements=kept, linear=False, router=False, part=part,
            fill=None if says == "nothing" else fill,
        )  # fmt: skip

    whole = (slice(None),)
    wanted = {
        "w": [piece("w", (4, 2), 2, None, (slice(1, 2), slice(None))), piece("w", (4, 2), 0, "nothing", whole)],
        "bad": [piece("bad", (2,), 2, None, whole), piece("bad", (2,), 2, None, whole)],
        "known": [piece("known", (2,), 2, True, whole)],
    }
    monkeypatch.setattr(loading, "wanted_by", lambda model: wanted)
    monkeypatch.setattr(loading, "loading_bar", lambda *given: (bars.append(Bar(*given)), bars[-1])[1])
    scheme: Any = SimpleNamespace(aliases={}, title="none", contradicts=lambda module: False)
    read = loading.load_checkpoint(torch.nn.Module(), folder, scheme, lambda name: False, True)
    assert sorted(filled) == [("bad", [1.0, float("inf")])] * 2 + [("known", [1.0, float("inf")]), ("w", [[2.0, 3.0]])]
    [bar] = bars
    assert (bar.total, bar.shown) == (8 + 2 * 8 + 8, True)
    assert sorted(bar.updates) == [8, 8, 16]
    assert read == bar.n == 32
    assert capsys.readouterr().out == f"warning: {folder}: 1 tensors hold NaN or infinite values: bad\n"
    monkeypatch.setattr(loading, "contradictions", lambda wanted, scheme: ["a", "b"])
    wanted.pop("bad")
    with pytest.raises(UserError, match=r"a: 1 tensors that the model does not know: bad$"):
        loading.load_checkpoint(torch.nn.Module(), folder, scheme, lambda name: False, True)
    loading.load_checkpoint(torch.nn.Module(), folder, scheme, lambda name: name == "bad", False)
    assert capsys.readouterr().out == f"warning: {folder}: 2 {loading.CONTRADICTION}: a, b\n"


def test_packed_weights_are_mapped_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Any = PackedCache.__new__(PackedCache)
    cache.folder, cache.mapped = tmp_path, True
    cache.large = {name: torch.zeros(size, dtype=torch.uint8) for name, size in (("a", 3), ("b", 9), ("c", 5))}
    cache.small = [torch.zeros(size, dtype=torch.uint8) for size in (2, 4)]
    for name, storage in cache.large.items():
        (tmp_path / name).write_bytes(bytes(len(storage)))
    (tmp_path / packed.SMALL).write_bytes(bytes(range(6)))
    done: Any = []
    maps = True
    bars: Any = []
    monkeypatch.setattr(packed, "loading_bar", lambda *given: (bars.append(Bar(*given)), bars[-1])[1])
    monkeypatch.setattr(packed.memory, "map_file", lambda storage, path: (done.append(("map", path.name)), maps)[1])
    monkeypatch.setattr(packed.memory, "read_file", lambda storage, path: done.append(("read", path.name)))
    assert cache._fill(True) == "mapped"
    assert done == [("map", "b"), ("map", "c"), ("map", "a")]  # the largest first
    assert (bars[0].total, bars[0].shown, bars[0].updates) == (17, True, [9, 5, 3])
    assert [storage.tolist() for storage in cache.small] == [[0, 1], [2, 3, 4, 5]]
    done.clear()
    maps = False
    assert cache._fill(False) == "read"
    assert done == [("map", "b"), ("read", "b"), ("read", "c"), ("read", "a")]  # mapping is tried once
    done.clear()
    cache.mapped = False
    assert cache._fill(False) == "read"
    assert done == [("read", "b"), ("read", "c"), ("read", "a")]
    for name in ("c", packed.SMALL):
        right = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(right + b"x")
        with pytest.raises(OSError, match=rf"^{name} has {len(right) + 1} bytes, expected {len(right)}$"):
            cache._fill(False)
        (tmp_path / name).write_bytes(right)
