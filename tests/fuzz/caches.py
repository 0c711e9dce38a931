"""The manifests of packed weights and of compiled graphs."""

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from executor.checkpoint.packed import MANIFEST, PackedCache
from executor.platform.ascend.compile_cache import CompileCache, Entry, clear_cache
from models.layers.base import Layer
from ops.cpu import memory
from tests.fuzz.target import Target

FACTS = {"torch": "2.13.0", "case": {"batch_size": 4, "sizes": (1, 2)}}


class Weights(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.frombuffer(memory.allocate(4096, 0), dtype=torch.uint8)
        self.small = torch.arange(16, dtype=torch.float32)

    def storages(self) -> Iterator[Tensor]:
        yield self.large
        yield self.small


def packed(folder: Path) -> Target:
    """A manifest; what it says of itself decides nothing but whether the weights are used."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    cache = PackedCache({"format": "q4"}, folder / "model", 0, Weights(), folder / "kept")
    with contextlib.redirect_stdout(io.StringIO()):
        cache.save()
    kept = (cache.folder / MANIFEST).read_bytes()

    def run(data: bytes) -> None:
        (cache.folder / MANIFEST).write_bytes(data)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            used = cache.load(progress=False)
        assert len(said.getvalue().splitlines()) == 1
        assert len(said.getvalue()) < 3000
        assert used == ("packing now" not in said.getvalue())

    return Target(run, [kept, kept.replace(b"q4", b"q8")])


def compiled(folder: Path) -> Target:
    cache = CompileCache("some", 0, 2, FACTS, folder / "cache", patience_s=0)

    def opened() -> Entry:
        with cache.open(4, [[[4], "int64"]]) as entry:
            if not entry.hit:
                (entry.folder / "graph.om").write_bytes(b"y")
            entry.seal()
        return entry

    def run(data: bytes) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            place.write_bytes(data)
            opened()
            place.write_bytes(data)
            clear_cache("some", folder / "cache")
            shutil.rmtree(place.parent, ignore_errors=True)
            shutil.copytree(whole, place.parent)

    with contextlib.redirect_stdout(io.StringIO()):
        place = opened().home / "manifest.json"
    whole = folder / "whole"
    shutil.copytree(place.parent, whole)
    place.parent.chmod(0o700)
    kept = place.read_bytes()
    return Target(run, [kept, kept.replace(b"2.13.0", b"2.8.0"), b'{"facts": {"layout": 1}, "files": null}'])
