"""The checkpoint to be quantised; its headers prove that all tensors are there before any data is read."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from torch import Tensor

from errors import UserError, listed
from executor.checkpoint.files import CheckpointFiles
from executor.checkpoint.formats.detect import read_scheme
from executor.checkpoint.formats.scheme import FLOATS, Unquantised
from executor.quantize.layer import float_shapes, linear_shapes
from executor.quantize.pack import PACKED
from models.qwen3_moe.config import Qwen3MoeConfig
from models.registry import read_config

CONFIG = "config.json"
# Files that are copied unchanged where the checkpoint has them.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class Source:
    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise UserError(f"--model {folder}: is not a folder: put the checkpoint there, or name another")
        self.folder, self.config = folder, cast(Qwen3MoeConfig, read_config(folder, "qwen3_moe"))
        scheme = read_scheme(folder)
        if not isinstance(scheme, Unquantised):
            raise UserError(f"--model {folder}: is quantised already ({scheme.title}): name the float checkpoint")
        self.companions = [folder / name for name in COMPANIONS if (folder / name).is_file()]
        self.files = CheckpointFiles(folder)
        self.headers = {name: self.files.header(name) for name in self.files.place}
        self._prove()

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of one decoder layer, by their names without the layer's prefix."""
        prefix = f"model.layers.{index}."
        tensors = self.read(name for name in self.headers if name.startswith(prefix))
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def rest(self) -> dict[str, Tensor]:
        """The tensors that belong to no decoder layer."""
        return self.read(name for name in self.headers if not name.startswith("model.layers."))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        tensors = {name: self.files(name, *[slice(None)] * len(self.headers[name][0])) for name in names}
        self.files.relieve()
        return tensors

    def check_group(self, group: int) -> None:
        """Refuse shapes that groups or int32 words do not divide."""
        for index, sparse in enumerate(self.config.sparse_layers):
            for name, (rows, columns) in linear_shapes(self.config, sparse).items():
                where = f"{self.folder}: model.layers.{index}.{name}"
                if columns % group:
                    raise UserError(f"{where}: {columns} columns are not a multiple of --group {group}: choose another")
                if rows % PACKED:
                    raise UserError(f"{where}: {rows} rows are not a multiple of {PACKED}, as this format needs")

    def digest(self) -> str:
        """Hash of the config, the copied files, and every tensor file's header and size.

        The weights themselves are left out, because reading them takes as long as quantising them.
        """
        digest = hashlib.sha256()
        for path in [self.folder / CONFIG, *self.companions]:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        for path in sorted(set(self.files.place.values())):
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")  # checked when the file was opened
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + file.read(length))
        return digest.hexdigest()

    def _prove(self) -> None:
        config, there = self.config, self.headers.keys()
        table = (config.vocab_size, config.hidden_size)
        wanted: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        wanted["model.norm.weight"] = (config.hidden_size,)
        if not config.tie_word_embeddings or "lm_head.weight" in there:  # a tied head may be saved all the same
            wanted["lm_head.weight"] = table
        for index, sparse in enumerate(config.sparse_layers):
            within = {**linear_shapes(config, sparse), **float_shapes(config, sparse)}
            wanted |= {f"model.layers.{index}.{name}": shape for name, shape in within.items()}
        wrong = []
        for name in sorted(wanted.keys() & there):
            shape, kind = self.headers[name]
            if shape != wanted[name]:
                wrong.append(f"{name} has shape {list(shape)}, expected {list(wanted[name])}")
            if kind not in FLOATS:
                wrong.append(f"{name} has type {kind}, expected one of {', '.join(FLOATS)}")
        for problem, names in (
            ("tensors missing", sorted(wanted.keys() - there)),
            ("tensors that the model does not know", sorted(there - wanted.keys())),
            ("tensors that do not fit", wrong),
        ):
            if names:
                raise UserError(f"{self.folder}: {len(names)} {problem}: {listed(names)}")
