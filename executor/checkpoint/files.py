"""The safetensors files of a checkpoint: which tensors they hold, and parts of them through memory maps.

The files are untrusted: everything that is wrong with them is a UserError that names the file.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import UserError, listed
from executor.checkpoint.formats.scheme import FLOATS
from executor.checkpoint.header import check_header
from executor.checkpoint.names import INDEX, SINGLE
from models.hf_config import read_json

MAPPED = 256 << 20  # bytes read before all maps are dropped: mapped pages count as memory of this process


class CheckpointFiles:
    """The tensors of the checkpoint in `folder`; an instance called with a name and slices reads that part."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.read = 0  # bytes in total
        self._maps: dict[Path, safe_open] = {}
        self._mapped = 0
        single, index = folder / SINGLE, folder / INDEX
        if single.is_file():
            self.place = self._tensors([single])
        elif index.is_file():
            self.place = self._indexed(index)
        else:
            raise UserError(f"model_path: {folder} holds neither {SINGLE} nor {INDEX} (other formats are not read)")

    def __contains__(self, name: str) -> bool:
        return name in self.place

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, name of the type in safetensors) of a tensor"""
        header = self._map(self.place[name]).get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def in_floats(self, name: str) -> bool:
        """Whether the checkpoint has this tensor, in a type of floats."""
        return name in self and self.header(name)[1] in FLOATS

    def __call__(self, name: str, *part: slice) -> Tensor:
        try:
            tensor: Tensor = self._map(self.place[name]).get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.place[name]}: {name}: truncated or corrupt: {error}") from None
        self.read += tensor.nbytes
        self._mapped += tensor.nbytes
        return tensor

    def relieve(self) -> None:
        """Drops the maps if many bytes were read through them; called between tensors."""
        if self._mapped > MAPPED:
            self._maps.clear()
            self._mapped = 0

    def _map(self, path: Path) -> safe_open:
        if path not in self._maps:
            try:
                self._maps[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: truncated or corrupt: {error}") from None
        return self._maps[path]

    def _tensors(self, paths: list[Path]) -> dict[str, Path]:
        place: dict[str, Path] = {}
        for path in paths:
            check_header(path)
            for name in self._map(path).keys():  # noqa: SIM118 (no mapping)
                if name in place:
                    raise UserError(f"{path}: tensor {name} is also in {place[name].name}")
                place[name] = path
        return place

    def _indexed(self, index: Path) -> dict[str, Path]:
        listed_in = read_json(index).get("weight_map")
        if not isinstance(listed_in, dict) or not listed_in or not all(isinstance(v, str) for v in listed_in.values()):
            raise UserError(f"{index}: weight_map must map tensor names to file names")
        for name in listed_in.values():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(f"{index}: {name!r:.80} is not the name of a .safetensors file in the same folder")
        place = self._tensors([self.folder / name for name in sorted(set(listed_in.values()))])
        astray = [n for n, file_name in listed_in.items() if place.get(n) != self.folder / file_name]
        if astray:
            raise UserError(f"{index}: tensors that are not in the file the index names: {listed(sorted(astray))}")
        return place
