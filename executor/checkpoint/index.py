"""The names of a checkpoint's tensors, read from its index or, if all are in one file, from the header of that. Imports
nothing heavy: the launcher looks for them too."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from executor.checkpoint.header import check_header
from umbra.errors import UserError
from umbra.files import read_json

SINGLE = "model.safetensors"  # all tensors in one file
INDEX = "model.safetensors.index.json"  # which file each tensor is in
LONGEST = 255  # characters of a file's name


def names_in(folder: Path, aliases: Mapping[str, str]) -> dict[str, str] | None:
    """The tensors of the checkpoint in `folder` as `in_model` returns them. None: the folder has no weights."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return in_model(check_header(single), aliases, single)
    return in_model(read_index(index), aliases, index) if index.is_file() else None


def read_index(index: Path) -> dict[str, str]:
    """The name of the file that each tensor is in. Other files are no part of the checkpoint."""
    listed_in = read_json(index).get("weight_map")
    if not isinstance(listed_in, dict) or not listed_in or not all(isinstance(v, str) for v in listed_in.values()):
        raise UserError(f"{index}: weight_map must map tensor names to file names")
    for name in set(listed_in.values()):
        if Path(name).name != name or not name.endswith(".safetensors") or len(name) > LONGEST:
            raise UserError(f"{index}: {name!r:.80} is not the name of a .safetensors file in the same folder")
    return listed_in


def in_model(names: Iterable[str], aliases: Mapping[str, str], where: Path) -> dict[str, str]:
    """The model's name of each tensor, with the name that it has in the files. `aliases` has parts of names that differ
    from the model's, each with the model's part."""
    found: dict[str, str] = {}
    for name in names:
        ours = ".".join(aliases.get(part, part) for part in name.split(".")) if aliases else name
        if ours in found:
            raise UserError(f"{where}: {found[ours]:.200} and {name:.200} are two names of one tensor of the model")
        found[ours] = name
    return found
