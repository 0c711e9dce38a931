"""The interface that the clients of hubs share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import UserError


@dataclass(frozen=True)
class HubName:
    """A model on a hub as the user names it: ORG/NAME, ORG/NAME@REVISION, and :QUANT or :FILE after either."""

    name: str
    revision: str | None
    file: str | None  # a file of a GGUF repository, or the quantisation in its name

    def error(self, text: str) -> UserError:
        at = f"@{self.revision}" if self.revision else ""
        return UserError(f"{self.name}{at}: {text}")


class Repository(ABC):
    """The files of one revision of a model, and the folder that holds those that were fetched."""

    sizes: Mapping[str, int]  # of each file that can be had; if the hub was not asked, of those that are in the folder
    folder: Path
    architecture = ""  # of GGUF files, if the hub says it
    cached = False  # whether the hub was not asked, because it is not to be or cannot be reached
    space: str  # how the user names another folder for it

    def __init__(self, model: HubName):
        self.model = model

    def files_here(self) -> dict[str, int]:
        """The sizes of the files that were fetched before."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    @abstractmethod
    def fetch(self, files: Sequence[str]) -> None:
        """Returns when the files are in `folder`."""

    def here(self, file: str) -> int:
        """The bytes of a file that need not be fetched any more."""
        path = self.folder / file
        return path.stat().st_size if path.is_file() else 0


def known(sizes: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """The sizes that a hub tells, without files whose names lead out of the folder."""
    return {name: size or 0 for name, size in sizes if not {"", ".", ".."} & set(name.split("/"))}
