"""One of llama.cpp's architectures, as the record of a family describes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umbra.models.gguf.keys import Keys
from umbra.models.gguf.names import Names

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func


@dataclass(frozen=True)
class Architecture:
    """The contents of GGUF files of one `general.architecture`. Several families may have the same one."""

    name: str
    names: Names
    gatings: tuple[int, ...]  # those that are implemented; none: its models have no experts
    # Returns the keys of config.json that other architectures do not have or have otherwise; of an architecture of
    # several families also their `model_type`.
    read: Callable[[Keys], dict[str, Any]]
    # Returns, for a model of the family's config, the metadata that other architectures do not have or have otherwise;
    # raises UserError for a config that no file can say.
    write: Callable[[Any], dict[str, Any]]
    assumed: str = ""  # what no file says, for a message
    partial: bool = False  # whether part of a head may rotate
    stops: tuple[str, ...] = ()  # tokens that end an answer, beside those that do in every model
    dense: bool = False  # whether some of its models have no experts
    own_attention: bool = False  # whether `read` says all of attention, whose keys others have or have otherwise
