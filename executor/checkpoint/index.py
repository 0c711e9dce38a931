"""The names of a checkpoint's tensors, read from its index or, if all are in one file, from the header of that. Imports
nothing heavy: the launcher looks for them too."""

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path

from umbra.base.errors import UserError, listed
from umbra.base.files import read_json
from umbra.executor.checkpoint.header import check_header

SINGLE = "model.safetensors"  # all tensors in one file
INDEX = "model.safetensors.index.json"  # which file each tensor is in
# modelslim's: what it says of the tensors, and the same two. Before v1 names ended with the quantisation.
DESCRIPTION = ("quant_model_description.json", "quant_model_description_*.json")
MODELSLIM = ("quant_model_weight*.safetensors.index.json", "quant_model_weight*.safetensors")
LONGEST = 255  # characters of a file's name


def description_in(folder: Path) -> Path | None:
    """modelslim's description of the checkpoint in `folder`; None: it is not modelslim's."""
    name = _first(_files(folder), DESCRIPTION, folder)
    return folder / name if name else None


def weights_in(folder: Path) -> Path | None:
    """The file with all tensors of the checkpoint in `folder`, or else the index of its files. None: there is
    neither."""
    name = weights_among(_files(folder), folder)
    return folder / name if name else None


def weights_among(files: Iterable[str], where: object) -> str | None:
    """The same of the checkpoint whose files have these names."""
    files = [name for name in files if "/" not in name]
    return _first(files, (*(MODELSLIM if _first(files, DESCRIPTION, where) else ()), SINGLE, INDEX), where)


def _files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _first(files: Iterable[str], patterns: Iterable[str], where: object) -> str | None:
    """The file that matches the first pattern that any matches."""
    for pattern in patterns:
        matches = sorted(fnmatch.filter(files, pattern))
        if len(matches) > 1:
            raise UserError(f"{where}: holds {listed(matches)}, of which a checkpoint has one: remove the others")
        if matches:
            return matches[0]
    return None


def names_in(folder: Path, aliases: Mapping[str, str]) -> dict[str, str] | None:
    """The tensors of the checkpoint in `folder` as `in_model` returns them. None: the folder has no weights."""
    path = weights_in(folder)
    if path is None:
        return None
    return in_model(read_index(path) if path.suffix == ".json" else check_header(path), aliases, path)


def read_index(index: Path) -> dict[str, str]:
    """The name of the file that each tensor is in. Other files are no part of the checkpoint."""
    listed_in = read_json(index).get("weight_map")
    if not isinstance(listed_in, dict) or not listed_in or not all(isinstance(v, str) for v in listed_in.values()):
        raise UserError(f"{index}: weight_map must map tensor names to file names")
    for name in set(listed_in.values()):
        if Path(name).name != name or not name.endswith(".safetensors") or len(name) > LONGEST:
            raise UserError(f"{index}: {name!r:.80} is not the name of a .safetensors file in the same folder")
    return listed_in


def renamed(name: str, parts: Iterable[tuple[str, str]]) -> str:
    """`name` with others in place of some parts, of which one may consist of several words, or of none."""
    for old, new in parts:
        name = f".{name}.".replace(f".{old}.", f".{new}." if new else ".")[1:-1]
    return name


def in_model(names: Iterable[str], aliases: Mapping[str, str], where: Path) -> dict[str, str]:
    """The model's name of each tensor, with the name that it has in the files. `aliases` has parts of names that differ
    from the model's, each with the model's."""
    by_our_name: dict[str, str] = {}
    for name in names:
        ours = renamed(name, aliases.items())
        if ours in by_our_name:
            raise UserError(
                f"{where}: {by_our_name[ours]:.200} and {name:.200} are two names of one tensor of the model"
            )
        by_our_name[ours] = name
    return by_our_name
