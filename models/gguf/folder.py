"""A GGUF file as the folder of a checkpoint: the files that its metadata stands for are written once, and `gguf.json`
says where its tensors lie. So everything else reads, and checks, what it reads of any checkpoint."""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError
from umbra.base.files import CACHES, read_json, sync
from umbra.models.gguf.container import SPLIT, Gguf, TensorInfo, parts_of, read_gguf
from umbra.models.gguf.keys import Keys
from umbra.models.gguf.metadata import architecture_of, config_of, head_width, value_heads
from umbra.models.gguf.names import Tiled, View, views_of
from umbra.models.gguf.vocabulary import AT, SENTENCE_PIECE, SPACED, Vocabulary
from umbra.models.hf_config import HfConfig
from umbra.models.registry import architectures, read_config

FOLDERS = CACHES / "packed_cache" / "gguf"
INDEX = "gguf.json"
LAYOUT = 6  # raised whenever the files that are written change
SUFFIX = ".gguf"


@dataclass(frozen=True)
class Index:
    """The tensors of a model in GGUF files."""

    paths: list[Path]
    tensors: dict[str, TensorInfo]
    views: dict[str, View]  # of these, by the model's names


def checkpoint_folder(path: Path) -> Path:
    """The folder of the checkpoint at `path`, which is a folder or a GGUF file, the first part of a split one."""
    if path.suffix != SUFFIX or path.is_dir():
        return path
    paths = parts_of(path.absolute())
    for part in paths:
        if part.exists() and not part.is_file():
            raise UserError(f"{part}: must be a regular file")
    try:
        sizes = [(part.stat().st_size, part.stat().st_mtime_ns) for part in paths]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    same = f"{name_of(path)}-{_digest(str(paths[0]))}"
    folder = FOLDERS / f"{same}-{_digest([LAYOUT, sizes])}"
    if not (folder / INDEX).is_file():
        gguf = read_gguf(paths[0])
        files = files_of(gguf)  # what is wrong is said before anything is written
        _write(folder, files, str(paths[0]))
        for old in FOLDERS.glob(f"{escape(same)}-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        if assumed := architecture_of(gguf).assumed:
            print(
                f"{path}: what the file does not say is as in all of {gguf.metadata['general.architecture']}: {assumed}"
            )
    return folder


def whole_path(checkpoint: Path) -> Path:
    """The absolute path of a checkpoint. A link to a file is not followed: behind it the file may have a name that says
    nothing, as in the hub's cache."""
    return checkpoint.resolve() if checkpoint.is_dir() else checkpoint.absolute()


def name_of(checkpoint: Path) -> str:
    """The name of its folder, or of its file without the number of a part. In a hub's cache a folder's name is its
    revision, and that of its model, ORG--NAME, is above it."""
    path = whole_path(checkpoint)
    if path.parent.name == "snapshots" and "--" in path.parents[1].name:
        return path.parents[1].name.rpartition("--")[2]
    match = SPLIT.fullmatch(path.name)
    return match[1] if match else path.name.removesuffix(SUFFIX)


def read_index(folder: Path) -> Index:
    """The index in `folder`, which `checkpoint_folder` wrote."""
    data = read_json(folder / INDEX)
    tensors = {name: TensorInfo(kind, tuple(shape), *rest) for name, (kind, shape, *rest) in data["tensors"].items()}
    names = architectures()[data["architecture"]].names
    tiled = data["tiled"] and Tiled(*data["tiled"])
    views = views_of(tensors, names, range(*data["predicting"]), data["files"][0], tiled, data["head_dim"])
    return Index([Path(path) for path in data["files"]], tensors, views)


def files_of(gguf: Gguf) -> dict[str, dict[str, Any]]:
    """The contents of the files of the folder, by their names."""
    config, meta = config_of(gguf), HfConfig(gguf.metadata, str(gguf.paths[0]))
    predicting, tiled = Keys(gguf).predicting, value_heads(gguf)
    contents = {
        INDEX: {
            "files": [str(path) for path in gguf.paths],
            "architecture": gguf.metadata["general.architecture"],
            "predicting": [predicting.start, predicting.stop],
            "head_dim": head_width(Keys(gguf)),
            "tiled": tiled and list(vars(tiled).values()),
            "tensors": {name: list(vars(info).values()) for name, info in gguf.tensors.items()},
        },
        "config.json": config,
    }
    kind = meta.value(f"{AT}model", default="no_vocab")
    if kind != "no_vocab":
        meta.one_of(f"{AT}model", allowed=("gpt2", SENTENCE_PIECE, SPACED))
        words = Vocabulary(meta)
        contents["tokenizer.json"], contents["tokenizer_config.json"] = words.tokenizer(), words.settings()
        contents["generation_config.json"] = words.generation(architecture_of(gguf).stops)
        config["eos_token_id"] = contents["generation_config.json"]["eos_token_id"]
    return contents


def _write(folder: Path, files: dict[str, dict[str, Any]], where: str) -> None:
    """Writes the folder of the file `where`, unless its family refuses the config."""
    new = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        new.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (new / name).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
            sync(new / name)
        sync(new)
        read_config(new, files["config.json"]["model_type"])
        with contextlib.suppress(OSError):  # another process was first
            new.rename(folder)
    except UserError as error:
        raise UserError(str(error).replace(str(new / "config.json"), where)) from None
    except OSError as error:
        raise UserError(f"{new}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
