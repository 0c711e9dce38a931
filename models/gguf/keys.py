"""The metadata of a GGUF file by the keys of its architecture."""

import math
import struct
from typing import Any

from umbra.base.errors import UserError
from umbra.models.gguf.container import Gguf
from umbra.models.gguf.names import ROPE_DIVISORS
from umbra.models.hf_config import HfConfig

LARGEST_VECTOR = 1 << 16  # bytes


class Keys:
    """The metadata of one file by its keys without the name of its architecture."""

    def __init__(self, gguf: Gguf):
        self.gguf, self.name = gguf, gguf.metadata["general.architecture"]
        self.all = HfConfig(gguf.metadata, str(gguf.paths[0]))

    def has(self, tensor: str) -> bool:
        return tensor in self.gguf.tensors

    def size(self, *keys: str, **options: Any) -> int:
        return self.all.size(*(f"{self.name}.{key}" for key in keys), **options)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number as it was before it became a float32; without a default it must be there."""
        name = f"{self.name}.{key}"
        if default is None and self.all.value(name) is None:
            raise self.all.error(name, "is missing")
        return float(f"{self.all.number(name, default=default or 1.0):.7g}")

    def flag(self, key: str, default: bool) -> bool:
        return self.all.flag(f"{self.name}.{key}", default)

    def flags(self, key: str) -> tuple[bool, ...]:
        """Returns a list of true and false, one for each layer."""
        name = f"{self.name}.{key}"
        values = self.all.value(name)
        if not isinstance(values, list) or not values or not all(isinstance(value, bool) for value in values):
            raise self.all.error(name, "must be a list of true and false")
        return tuple(values)

    def rows(self, tensor: str, dimension: int = -2) -> int | None:
        """Returns the rows of a tensor, for keys that older files lack."""
        info = self.gguf.tensors.get(tensor)
        return info.shape[dimension] if info and len(info.shape) >= -dimension else None

    def _floats(self, tensor: str) -> list[float]:
        """Returns the values of a vector of float32."""
        info = self.gguf.tensors[tensor]
        if info.kind != "F32" or len(info.shape) != 1 or info.nbytes > LARGEST_VECTOR:
            raise UserError(f"{self.all.where}: tensor {tensor} must be a vector in F32")
        path = self.gguf.paths[info.part]
        with path.open("rb") as file:
            file.seek(info.offset)
            values = file.read(info.nbytes)
        if len(values) != info.nbytes:  # the file has become shorter
            raise UserError(f"{path}: tensor {tensor}: truncated")
        return [value for (value,) in struct.iter_unpack("<f", values)]

    @property
    def predicting(self) -> range:
        """The numbers of the last layers, which predict further tokens."""
        layers = self.size("block_count")
        return range(layers - self.size("nextn_predict_layers", default=0, minimum=0), layers)

    def expert_width(self) -> int:
        return self.size("expert_feed_forward_length", default=self.rows("blk.0.ffn_up_exps.weight"))

    def kv_heads(self, heads: int) -> int:
        """Returns the number of heads of keys and values of every layer, by default that of queries."""
        name = f"{self.name}.attention.head_count_kv"
        counts = self.all.one_or_more(name)
        if len(set(counts)) > 1:
            raise self.all.error(name, "must be the same in every layer")
        return counts[0] if counts else heads

    def divisors(self) -> list[float]:
        """Returns those of the frequencies of rotary embedding; empty: there are none."""
        return self._floats(ROPE_DIVISORS) if self.has(ROPE_DIVISORS) else []

    def scaling(self) -> dict[str, Any] | None:
        """Returns `rope_scaling` of config.json. Files of Llama 3 have divisors of its frequencies alone."""
        if divisors := self.divisors():
            return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        kind = self.all.value(f"{self.name}.rope.scaling.type", default="none")
        if kind == "none":
            return None
        scaling: dict[str, Any] = {"rope_type": kind}
        if kind == "yarn":
            factor = self.number("rope.scaling.factor")
            scaling["factor"] = factor
            scaling["original_max_position_embeddings"] = self.size("rope.scaling.original_context_length")
            for key in ("beta_fast", "beta_slow"):
                if self.all.value(f"{self.name}.rope.scaling.yarn_{key}") is not None:
                    scaling[key] = self.number(f"rope.scaling.yarn_{key}")
            times = self.number("rope.scaling.attn_factor", self.number("rope.scaling.yarn_attn_factor", 1.0))
            if times != 1:
                scaling["attention_factor"] = times * (0.1 * math.log(factor) + 1.0)
        return scaling
