"""What the executor reads of a model's configuration, under names that every family shares."""

from pathlib import Path
from typing import Any, ClassVar, Protocol


class ModelConfig(Protocol):
    """A frozen dataclass that `from_folder` reads from a checkpoint's config.json."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads `folder`/config.json; UserError, naming the key, for what is invalid or not implemented."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the position embedding is made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def expert_count(self) -> int:
        """Routed experts of each layer that has any; 0: no layer has."""

    @property
    def experts_per_token(self) -> int:
        """How many of them the router chooses for a token."""

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        """UserError where a size does not divide what is split by it."""
