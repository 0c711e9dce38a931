"""The checkpoint that is quantised: its tensors, proven complete from the headers before any data is read."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import UserError, listed
from models.hf_config import read_json
from models.qwen3_moe.config import Qwen3MoeConfig
from tools.awq.layer import float_shapes, linear_shapes
from tools.awq.pack import PACKED

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FLOATS = ("BF16", "F16", "F32")
# Copied as they are, where the checkpoint has them.
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
        self.folder, self.config = folder, Qwen3MoeConfig.from_folder(folder)
        self.companions = [folder / name for name in COMPANIONS if (folder / name).is_file()]
        self.paths = self._paths()
        self.place: dict[str, Path] = {}  # of each tensor
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self.paths:
            self._read_header(path)
        self._prove()

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of one decoder layer, under their names within it."""
        prefix = f"model.layers.{index}."
        tensors = self.read(name for name in self.place if name.startswith(prefix))
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def rest(self) -> dict[str, Tensor]:
        return self.read(name for name in self.place if not name.startswith("model.layers."))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        files: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            files[self.place[name]].append(name)
        tensors: dict[str, Tensor] = {}
        for path, within in files.items():
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in within}
        return tensors

    def check_group(self, group: int) -> None:
        """Groups and int32 words must come out even."""
        for index, sparse in enumerate(self.config.sparse_layers):
            for name, (rows, columns) in linear_shapes(self.config, sparse).items():
                where = f"{self.folder}: model.layers.{index}.{name}"
                if columns % group:
                    raise UserError(f"{where}: {columns} columns are not a multiple of --group {group}: choose another")
                if rows % PACKED:
                    raise UserError(f"{where}: {rows} rows are not a multiple of {PACKED}, as this format needs")

    def digest(self) -> str:
        """Of the config, the files copied, and every tensor file's header and size; not of the weights themselves,
        which take as long to read as to quantise."""
        digest = hashlib.sha256()
        for path in [self.folder / CONFIG, *self.companions]:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        for path in self.paths:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")  # safe_open has accepted it
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + file.read(length))
        return digest.hexdigest()

    def _paths(self) -> list[Path]:
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        index = self.folder / INDEX
        if not index.is_file():
            raise UserError(f"--model {self.folder}: holds neither {SINGLE} nor {INDEX} (other formats are not read)")
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(n, str) and Path(n).name == n and n.endswith(".safetensors") for n in names.values()
        ):
            raise UserError(f"{index}: weight_map must map tensor names to .safetensors files in the same folder")
        return [self.folder / name for name in sorted(set(names.values()))]

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    header = file.get_slice(name)
                    if name in self.place:
                        raise UserError(f"{path}: tensor {name} is also in {self.place[name].name}")
                    if header.get_dtype() not in FLOATS:
                        raise UserError(
                            f"{path}: {name} has type {header.get_dtype()}, expected one of {', '.join(FLOATS)}"
                        )
                    self.place[name], self.shapes[name] = path, tuple(header.get_shape())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist, but the checkpoint's index names it") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: truncated or corrupt: {error}") from None

    def _prove(self) -> None:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        wanted: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        wanted["model.norm.weight"] = (config.hidden_size,)
        if not config.tie_word_embeddings or "lm_head.weight" in self.shapes:  # a tied head may be saved all the same
            wanted["lm_head.weight"] = table
        for index, sparse in enumerate(config.sparse_layers):
            within = {**linear_shapes(config, sparse), **float_shapes(config, sparse)}
            wanted |= {f"model.layers.{index}.{name}": shape for name, shape in within.items()}
        wrong = [
            f"{name} has shape {list(self.shapes[name])}, expected {list(shape)}"
            for name, shape in wanted.items()
            if name in self.shapes and self.shapes[name] != shape
        ]
        for problem, names in (
            ("tensors missing", sorted(wanted.keys() - self.shapes.keys())),
            ("tensors that the model does not know", sorted(self.shapes.keys() - wanted.keys())),
            ("tensors that do not fit", wrong),
        ):
            if names:
                raise UserError(f"{self.folder}: {len(names)} {problem}: {listed(names)}")
