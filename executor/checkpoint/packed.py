"""Keeps a rank's quantised weights in `packed_cache/`, so that the next start copies them instead of quantising again.

Each checkpoint, rank and set of settings has a folder, whose `manifest.json` says what it was made from. The folder is
used only while all of that is unchanged; otherwise a new one replaces it. A folder appears whole or not at all: it is
written under another name, then renamed. The files are mapped one at a time and copied into the memory of the weights,
which has huge pages and lies on the right NUMA node; a map of the file would have neither.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from files import ROOT
from models.layers.base import layers_of

CACHE = ROOT / "packed_cache"
MANIFEST = "manifest.json"
LAYOUT = 3  # raised whenever the meaning of packed bytes changes


class PackedCache:
    def __init__(
        self, facts: Mapping[str, Any], checkpoint: Path, rank: int, model: nn.Module, root: Path = CACHE,
        shard_bytes: int = 1 << 30,
    ):  # fmt: skip
        """`facts` has everything that decides the packed bytes, except the checkpoint and the rank. Files have at most
        `shard_bytes` bytes, unless a single tensor has more."""
        self.shard_bytes = shard_bytes
        self.storages = {
            f"{path}.{i}": storage.flatten().view(torch.uint8)
            for path, layer in layers_of(model)
            for i, storage in enumerate(layer.storages())
        }
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
            "bytes": {name: storage.numel() for name, storage in self.storages.items()},
        }

    def load(self, progress: bool) -> bool:
        """Fill the model from the folder and return True, or return False and print why the folder cannot be used."""
        reason = self._mismatch()
        if not reason:
            try:
                self._copy(progress)
            except (SafetensorError, OSError, RuntimeError) as error:
                reason = f"unreadable: {error}"
        print(f"packed weights: {f'made anew ({reason})' if reason else f'taken from {self.folder}'}")
        return not reason

    def save(self) -> None:
        """Write the model's weights to the folder. A failure is only printed: it makes the next start slower."""
        temporary = self.folder.with_name(f"{self.folder.name}.{os.getpid()}.tmp")
        try:
            for left in self.folder.parent.glob(f"{self.folder.name}.*.tmp"):
                if not Path("/proc", left.name.split(".")[-2]).exists():  # its writer was killed
                    shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir(parents=True)
            for i, shard in enumerate(_shards(self.storages, self.shard_bytes)):
                save_file(shard, temporary / f"{i}.safetensors")
            (temporary / MANIFEST).write_text(json.dumps(self.manifest, indent=1))
            if (self.folder / MANIFEST).is_file():
                shutil.rmtree(self.folder)
            temporary.rename(self.folder)
            print(f"packed weights: kept in {self.folder}, {sum(self.manifest['bytes'].values()) / 1e6:.1f} MB")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            print(f"packed weights: not kept in {self.folder}: {error}")

    def _mismatch(self) -> str:
        """The reason why the folder cannot be used; empty if it can be."""
        try:
            kept = json.loads((self.folder / MANIFEST).read_text())
        except FileNotFoundError:
            return "none kept yet"
        except (OSError, ValueError) as error:
            return f"{MANIFEST} unreadable: {error}"
        changed = [key for key, value in self.manifest.items() if not isinstance(kept, dict) or kept.get(key) != value]
        return f"changed: {', '.join(changed)}" if changed else ""

    def _copy(self, progress: bool) -> None:
        left = dict(self.storages)
        bar = tqdm(total=len(left), desc="loading", unit="tensor", disable=None if progress else True, leave=False)
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    left.pop(name).copy_(file.get_tensor(name))
                    bar.update()
        bar.close()
        if left:
            raise OSError(f"{len(left)} tensors missing")


def _sources(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.iterdir() if p.suffix in (".safetensors", ".json"))


def _shards(storages: dict[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, storage in storages.items():
        if shard and sum(s.numel() for s in shard.values()) + storage.numel() > most:
            yield shard
            shard = {}
        shard[name] = storage
    yield shard
