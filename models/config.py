"""The part of a model's configuration that the executor reads, under names that all families share."""

from pathlib import Path
from typing import Any, ClassVar, Protocol


class ModelConfig(Protocol):
    """A frozen dataclass that `from_folder` reads from a checkpoint's config.json."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads `folder`/config.json. A value that is invalid or not implemented raises a UserError that names its
        key."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the position embedding is made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def expert_count(self) -> int:
        """Number of routed experts of each layer that has experts; 0 if no layer has."""

    @property
    def experts_per_token(self) -> int:
        """Number of experts that the router chooses for a token."""

    def check_parallel(
        self, attn_tp_size: int, moe_tp_size: int, moe_ep_size: int, embed_tp_size: int, lmhead_tp_size: int
    ) -> None:
        """Raises UserError if a size does not divide the dimension that is split by it."""
