"""The checkpoint to be quantised; its headers prove that all tensors are there before any data is read."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from umbra.base.errors import UserError, listed
from umbra.base.files import read_json
from umbra.executor.checkpoint.files import CheckpointFiles
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.formats.fp8 import Fp8Matrix
from umbra.executor.checkpoint.load import problems_of, stored_as, wanted_by
from umbra.models.build import Build, DraftParts, Formats, StoredModules
from umbra.models.family import QuantisedFiles
from umbra.models.layers.attention import AttentionConfig
from umbra.models.registry import families, family, family_in, model_class, read_config
from umbra.ops import load_ops
from umbra.ops.formats import FORMATS
from umbra.ops.formats.quantised import floats
from umbra.ops.formats.rows import Alternating
from umbra.ops.parallel.groups import Parallel

CONFIG = "config.json"


class QuantisationConfig(AttentionConfig, Protocol):
    """The part of a family's config that quantising reads."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


# Files that are copied unchanged where the checkpoint has them.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "chat_template.jinja",
)
PLAIN = FORMATS["float32"]


class CheckpointSource:
    def __init__(self, folder: Path):
        if not folder.is_dir():
            rule = "is a file: quantize reads folders of safetensors" if folder.is_file() else "is not a folder"
            raise UserError(f"--model {folder}: {rule}: put the checkpoint there, or name another")
        name = family_in(folder)
        config = read_config(folder, name)
        self.folder, self.name, self.whole_config = folder, name, config
        self.config = cast(QuantisationConfig, config)
        self.scheme = scheme = read_scheme(folder)
        build = Build(
            load_ops("reference"),
            Parallel(),
            Formats(PLAIN, PLAIN, PLAIN),
            torch.float32,
            torch.device("meta"),
            max_positions=1,
            stored=StoredModules(holds=scheme.holds),
        )
        model = model_class(name)(config, build)
        if model.mtp_sign and scheme.holds(model.mtp_sign):
            model = model_class(name)(config, dataclasses.replace(build, drafts=DraftParts(mtp=True)))
        self.mtp = model.mtp_at  # the path of a layer for multi-token prediction; empty: the files hold none
        # The paths of what is written one after another.
        self.parts = [*(f"model.layers.{i}" for i in range(self.config.num_hidden_layers)), *filter(None, [self.mtp])]
        wanted = wanted_by(model)
        self.inside: dict[str, tuple[str, int, slice]] = {}  # the matrices that are read from tensors of all experts
        self.shapes: dict[str, tuple[int, ...]] = {}
        linear: list[str] = []
        for tensor, (piece, *_) in wanted.items():
            held = {tensor: piece.shape}
            if piece.linear and len(piece.shape) == 3 and not piece.by_input:
                self.inside |= (matrices := _matrices(tensor, piece.shape))
                held = {matrix: (rows.stop - rows.start, piece.shape[2]) for matrix, (_, _, rows) in matrices.items()}
            self.shapes |= held
            linear += held if piece.linear else ()
        self.linear = {name.removesuffix(".weight"): self.shapes[name] for name in linear}  # (out, in) of each module
        self.fused = {name for name in linear if len(self.shapes[name]) == 3}  # (experts, out, in): of all experts
        self.files_of_family = family(name).quantised
        if not (self.files_of_family or self.fused):
            known = [record.name for record in families() if record.quantised]
            raise UserError(f"--model {folder}: {name} cannot be quantised, only {', '.join(known)}")
        self.encodings = {type(encoding) for encoding in map(scheme.encoding, self.linear) if encoding}
        # The modules of that layer that are small, or that official files in FP8 have in floats too.
        floats = tuple(f".{module}" for module in (self.files_of_family.floats if self.files_of_family else ()))
        self.mtp_floats = [
            module
            for module in self.linear
            if self.mtp
            and module.startswith(f"{self.mtp}.")
            and (module.endswith(floats) or any(piece.router for piece in wanted.get(f"{module}.weight", [])))
        ]
        if self.encodings - {Fp8Matrix}:
            raise UserError(f"--model {folder}: is quantised already ({scheme.title}): name one in floats or FP8")
        self._reading = Lock()  # of the maps, which several threads use
        self.companions = [folder / name for name in COMPANIONS if (folder / name).is_file()]
        self.files = CheckpointFiles(folder, scheme.aliases)
        self.stored = {name: stored_as(pieces, scheme) for name, pieces in wanted.items()}
        for problem, names in problems_of(self.files, self.stored, scheme, model.ignores):
            raise UserError(f"{folder}: {len(names)} {problem}: {listed(names)}")

    @property
    def config_json(self) -> dict[str, Any]:
        """The contents of config.json; of a model that sees pictures, those of one that only reads text."""
        whole = read_json(self.folder / CONFIG)
        if not isinstance(text := whole.get("text_config"), dict):
            return whole
        return text | {"architectures": [family(self.name).architecture]}

    @property
    def quantised_files(self) -> QuantisedFiles:
        """The layout of the family's AWQ, FP8 and W8A8 files."""
        if not self.files_of_family:
            raise UserError(
                f"--model {self.folder}: AWQ and FP8 have matrices of one expert each, {self.name}'s files have all "
                "experts in one: --format mxfp4"
            )
        return self.files_of_family

    @property
    def fp8_floats(self) -> list[str]:
        """The `modules_to_not_convert` of the family's official files in FP8."""
        files, paths = self.quantised_files, {name.rpartition(".")[0] for name in self.shapes}
        modules = files.floats if files.fp8_floats is None else files.fp8_floats
        inside = [f"{part}.{module}" for part in self.parts if part != self.mtp for module in modules]
        return [*files.fp8_anywhere, *(path for path in inside if path in paths)]

    def layer(self, index: int) -> "LayerTensors":
        return LayerTensors(self, f"{self.parts[index]}.")

    def rest(self) -> dict[str, Tensor]:
        """The tensors that belong to none of `parts`."""
        names = [name for name in self.shapes if not name.startswith(tuple(f"{part}." for part in self.parts))]
        return {name: self.read(name).to(self.float_type(name)) for name in names}

    def read(self, name: str, *cut: slice) -> Tensor:
        """The weight of this name, or a cut of it: as it is stored, or in float32 if it is quantised."""
        cuts = (*cut, *(slice(0, size) for size in self.shapes[name][len(cut) :]))
        stored, one = name, tuple[slice, ...]()
        if name in self.inside:
            stored, expert, rows = self.inside[name]
            one, cuts = (slice(expert, expert + 1),), (rows, *cuts[1:])
        with self._reading:
            part = self.stored[stored].read(self.files, *one, *cuts)
            self.files.relieve()
        if isinstance(part, Alternating):
            raise AssertionError(f"{name}: of no family that is quantised")
        return floats(part)[0] if one else floats(part)

    def float_type(self, name: str) -> torch.dtype:
        """The type in which the weight is written if it stays in floats: its own, or bfloat16 if it is quantised."""
        name, *_ = self.inside.get(name, (name,))
        return {"F32": torch.float32, "F16": torch.float16}.get(self.files.header(name)[1], torch.bfloat16)

    def digest(self) -> str:
        """Hash of the config, the copied files, and every tensor file's header and size.

        The weights themselves are left out, because reading them takes as long as quantising them.
        """
        digest = hashlib.sha256()
        for path in [self.folder / CONFIG, *self.companions]:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        for path in sorted(set(self.files.file_of.values())):
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")  # checked when the file was opened
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + file.read(length))
        return digest.hexdigest()


def _matrices(name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, int, slice]]:
    """The matrices of each expert that the tensor of all experts `name` holds, by the names that checkpoints give them
    otherwise: the tensor, the expert, and its rows there."""
    (experts, rows, _), (path, _, last) = shape, name.rpartition(".")
    parts = {"down_proj": slice(0, rows)}
    if last != "down_proj":
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return {f"{path}.{e}.{part}.weight": (name, e, cut) for e in range(experts) for part, cut in parts.items()}


class LayerTensors(Mapping[str, Tensor]):
    """The tensors of one decoder layer, by their names without `prefix`. Each is read when it is asked for, so that a
    layer, which may have 7 GB, is never in memory as a whole."""

    def __init__(self, source: CheckpointSource, prefix: str):
        self.source, self.prefix = source, prefix
        self.names = [name.removeprefix(prefix) for name in source.shapes if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        return self.source.read(self.prefix + name)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name; of a tensor of all experts one after another, (1, out, in)."""
        for name in self.names:
            if (full := self.prefix + name) in self.source.fused:
                for expert in range(self.source.shapes[full][0]):
                    yield name, self.source.read(full, slice(expert, expert + 1))
            else:
                yield name, self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
