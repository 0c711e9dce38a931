"""Keeps a rank's quantised weights in `packed_cache/`, so that the next start maps them instead of packing again.

Each checkpoint, rank and set of settings has a folder, whose `manifest.json` says what it was made from. The folder is
used only while all of that is unchanged; otherwise a new one replaces it. A folder appears whole or not at all, also
after a loss of power: it is written under another name, and renamed when all of it is on the disk. An old one is
renamed before it is removed. What a killed process leaves has such another name, and the next start removes it. Files
are never changed in place, so that a process that has mapped them keeps the old ones when a new folder replaces them.

Each large storage has a file of its own, which begins at a huge page when it is mapped in the storage's place. Where
memory must lie on a certain NUMA node, or the system would not map huge pages, the files are read instead. The small
storages are read from one file, one after the other.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from umbra.base.errors import UserError
from umbra.base.files import CACHES, read_json, sync
from umbra.base.progress import progress as showing
from umbra.models.gguf.folder import INDEX, name_of, read_index
from umbra.models.layers.base import layers_of
from umbra.ops.cpu import memory

CACHE = CACHES / "packed_cache"
MANIFEST, SMALL = "manifest.json", "small.bin"
PIECE = 64 << 20
LAYOUT = 5  # raised whenever the meaning of packed bytes changes


class PackedCache:
    def __init__(
        self,
        facts: Mapping[str, Any],
        checkpoint: Path,
        rank: int,
        model: nn.Module,
        root: Path = CACHE,
        mapped: bool = True,
    ):
        """`facts` has everything that decides the packed bytes, except the checkpoint and the rank. Without
        `mapped`, files are read into memory, which may then be written."""
        self.mapped = mapped
        storages = {
            f"{path}.{i}": storage.flatten().view(torch.uint8)
            for path, layer in layers_of(model)
            for i, storage in enumerate(layer.storages())
        }
        self.large = {f"{name}.bin": storage for name, storage in storages.items() if memory.is_allocated(storage)}
        self.small = [storage for storage in storages.values() if not memory.is_allocated(storage)]
        name, sources = sources_of(checkpoint)
        settings = {"layout": LAYOUT, "checkpoint": name, "rank": rank, **facts}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self.folder = root / f"{name_of(Path(name))}-{digest}"
        self.manifest: dict[str, Any] = {
            "settings": settings,
            "sources": sources,
            "bytes": {name: storage.nbytes for name, storage in storages.items()},
        }

    def load(self, progress: bool) -> bool:
        """Fill the model from the folder and return True, or return False and print why the folder cannot be used."""
        self._sweep()
        reason, how = self._mismatch(), ""
        if not reason:
            try:
                how = self._fill(progress)
            except OSError as error:
                reason = f"unreadable: {error}"
                for storage in self.large.values():
                    memory.clear(storage)
        print(f"packed weights: {f'{reason}, packing now' if reason else f'{how} from {self.folder}'}")
        return not reason

    def save(self) -> None:
        """Write the model's weights to the folder. A failure is only printed: it makes the next start slower."""
        new, old = (self.folder.with_name(f"{self.folder.name}.{os.getpid()}.{use}.tmp") for use in ("new", "old"))
        try:
            new.mkdir(parents=True)
            with _locked(new):
                for name, storage in self.large.items():
                    _write(new / name, [storage])
                _write(new / SMALL, self.small)
                manifest = bytearray(json.dumps(self.manifest, indent=1).encode())
                _write(new / MANIFEST, [torch.frombuffer(manifest, dtype=torch.uint8)])
                sync(new)
                if (self.folder / MANIFEST).is_file():
                    self.folder.rename(old)
                new.rename(self.folder)
            sync(self.folder.parent)
            print(f"packed weights: kept in {self.folder}, {sum(self.manifest['bytes'].values()) / 1e6:.1f} MB")
        except OSError as error:
            print(f"packed weights: not kept in {self.folder}: {error}")
        finally:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes what killed processes have left."""
        for left in self.folder.parent.glob(f"{escape(self.folder.name)}.*.tmp"):
            with contextlib.suppress(OSError), _locked(left):  # or its writer lives
                shutil.rmtree(left, ignore_errors=True)

    def _mismatch(self) -> str:
        """The reason why the folder cannot be used; empty if it can be."""
        if not (self.folder / MANIFEST).exists():
            return "none cached yet"
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
        mapped = self.mapped
        with showing("loading weights", sum(sizes.values()), "B", progress) as bar:
            for name in sorted(sizes, key=lambda name: -sizes[name]):  # the largest show best whether mapping pays
                mapped = mapped and memory.map_file(self.large[name], self.folder / name)
                if not mapped:
                    memory.read_file(self.large[name], self.folder / name)
                bar.reach(bar.done + sizes[name])
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
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which its process loses when it ends. Raises OSError if another one has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def weight_files(checkpoint: Path) -> list[Path]:
    """The files that the weights of the checkpoint in this folder depend on."""
    if (checkpoint / INDEX).is_file():
        return [*read_index(checkpoint).paths]
    return sorted(p for p in checkpoint.iterdir() if p.suffix in (".safetensors", ".json"))


def sources_of(checkpoint: Path) -> tuple[str, dict[str, list[int]]]:
    """The path of the checkpoint in this folder, and the sizes and times of the files that its weights depend on."""
    files = weight_files(checkpoint)
    path = files[0] if (checkpoint / INDEX).is_file() else checkpoint.resolve()
    return str(path), {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in files}
