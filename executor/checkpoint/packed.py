"""Keeps a rank's quantised weights in `packed_cache/`, so that the next start maps them instead of quantising again.

Each checkpoint, rank and set of settings has a folder, whose `manifest.json` says what it was made from. The folder is
used only while all of that is unchanged; otherwise a new one replaces it. A folder appears whole or not at all: it is
written under another name, then renamed. Files are never changed in place, so that a process that has mapped them keeps
the old ones when a new folder replaces them.

Each large storage has a file of its own, which begins at a huge page when it is mapped in the storage's place. Where
memory must lie on a certain NUMA node, or the system would not map huge pages, the files are read instead. The small
storages are read from one file, one after the other.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import UserError
from executor.checkpoint.progress import loading_bar
from files import ROOT
from models.hf_config import read_json
from models.layers.base import layers_of
from ops.cpu import memory

CACHE = ROOT / "packed_cache"
MANIFEST, SMALL = "manifest.json", "small.bin"
PIECE = 64 << 20
LAYOUT = 4  # raised whenever the meaning of packed bytes changes


class PackedCache:
    def __init__(self, facts: Mapping[str, Any], checkpoint: Path, rank: int, model: nn.Module, root: Path = CACHE):
        """`facts` has everything that decides the packed bytes, except the checkpoint and the rank."""
        storages = {
            f"{path}.{i}": storage.flatten().view(torch.uint8)
            for path, layer in layers_of(model)
            for i, storage in enumerate(layer.storages())
        }
        self.large = {f"{name}.bin": storage for name, storage in storages.items() if memory.is_allocated(storage)}
        self.small = [storage for storage in storages.values() if not memory.is_allocated(storage)]
        settings = {
            "layout": LAYOUT,
            "checkpoint": str(checkpoint.resolve()),
            "rank": rank,
            **facts,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self.folder = root / f"{checkpoint.name}-{digest}"
        self.manifest: dict[str, Any] = {
            "settings": settings,
            "sources": {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in _sources(checkpoint)},
            "bytes": {name: storage.nbytes for name, storage in storages.items()},
        }

    def load(self, progress: bool) -> bool:
        """Fill the model from the folder and return True, or return False and print why the folder cannot be used."""
        reason, how = self._mismatch(), ""
        if not reason:
            try:
                how = self._fill(progress)
            except OSError as error:
                reason = f"unreadable: {error}"
                for storage in self.large.values():
                    memory.clear(storage)
        print(f"packed weights: {f'made anew ({reason})' if reason else f'{how} from {self.folder}'}")
        return not reason

    def save(self) -> None:
        """Write the model's weights to the folder. A failure is only printed: it makes the next start slower."""
        temporary = self.folder.with_name(f"{self.folder.name}.{os.getpid()}.tmp")
        try:
            for left in self.folder.parent.glob(f"{self.folder.name}.*.tmp"):
                if not Path("/proc", left.name.split(".")[-2]).exists():  # its writer was killed
                    shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, storage in self.large.items():
                _write(temporary / name, [storage])
            _write(temporary / SMALL, self.small)
            (temporary / MANIFEST).write_text(json.dumps(self.manifest, indent=1))
            if (self.folder / MANIFEST).is_file():
                shutil.rmtree(self.folder)
            temporary.rename(self.folder)
            print(f"packed weights: kept in {self.folder}, {sum(self.manifest['bytes'].values()) / 1e6:.1f} MB")
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            print(f"packed weights: not kept in {self.folder}: {error}")

    def _mismatch(self) -> str:
        """The reason why the folder cannot be used; empty if it can be."""
        if not (self.folder / MANIFEST).exists():
            return "none kept yet"
        try:
            kept = read_json(self.folder / MANIFEST)
        except UserError as error:
            return f"{MANIFEST} unreadable: {error}"
        changed = [key for key, value in self.manifest.items() if kept.get(key) != value]
        return f"changed: {', '.join(changed)}" if changed else ""

    def _fill(self, progress: bool) -> str:
        """Returns how: "mapped" or "read"."""
        sizes = {name: storage.nbytes for name, storage in self.large.items()}
        for name, size in {**sizes, SMALL: sum(storage.nbytes for storage in self.small)}.items():
            if (there := (self.folder / name).stat().st_size) != size:
                raise OSError(f"{name} has {there} bytes, expected {size}")
        mapped = True
        with loading_bar(sum(sizes.values()), progress) as bar:
            for name in sorted(sizes, key=lambda name: -sizes[name]):  # the largest show best whether mapping pays
                mapped = mapped and memory.map_file(self.large[name], self.folder / name)
                if not mapped:
                    memory.read_file(self.large[name], self.folder / name)
                bar.update(sizes[name])
        with open(self.folder / SMALL, "rb") as file:
            for storage in self.small:
                file.readinto(storage.numpy().data)
        return "mapped" if mapped else "read"


def _write(path: Path, storages: Iterable[Tensor]) -> None:
    """In large pieces: the system keeps in large pages what is written at once."""
    with open(path, "wb", buffering=0) as file:
        for storage in storages:
            for piece in storage.split(PIECE):
                left = piece.numpy().data
                while left:
                    left = left[file.write(left) :]


def _sources(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.iterdir() if p.suffix in (".safetensors", ".json"))
