"""The metadata of a GGUF file by the keys of its architecture."""

from typing import Any

from umbra.models.gguf.container import Gguf
from umbra.models.hf_config import HfConfig


class Keys:
    """The metadata of one architecture."""

    def __init__(self, gguf: Gguf, name: str):
        self.gguf, self.name = gguf, name
        self.all = HfConfig(gguf.metadata, str(gguf.paths[0]))

    def has(self, tensor: str) -> bool:
        return tensor in self.gguf.tensors

    def size(self, *keys: str, **options: Any) -> int:
        return self.all.size(*(f"{self.name}.{key}" for key in keys), **options)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number as it was before it became a float32; without a default it must be there."""
        name = f"{self.name}.{key}"
        if default is None and self.all.value(name) is None:
            raise self.all.error(name, "is missing")
        return float(f"{self.all.number(name, default=default or 1.0):.7g}")

    def flag(self, key: str, default: bool) -> bool:
        return self.all.flag(f"{self.name}.{key}", default)

    def rows(self, tensor: str, dimension: int = -2) -> int | None:
        """The rows of a tensor, for keys that older files lack."""
        info = self.gguf.tensors.get(tensor)
        return info.shape[dimension] if info and len(info.shape) >= -dimension else None
