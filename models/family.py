"""The record of a model family: all that is particular to it beside its config and its model. Records need no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from umbra.models.gguf.architecture import Architecture
from umbra.models.mtp_names import MtpNames


@dataclass(frozen=True)
class Family:
    """One family of models. `models/registry.py` finds its record by its name."""

    name: str  # `model_type` in a config.json, and a case's `model_name`
    config: str  # a models.config.ModelConfig, as `module:name`
    model: str  # a models.causal_lm.CausalLM, as `module:name`
    old_types: tuple[str, ...] = ()  # `model_type` in early checkpoints, if `architectures` names the model
    pictured: tuple[str, ...] = ()  # `model_type` of models that also see pictures
    # Parts of tensors' names that some files have, each with the model's.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Models of other architectures that are easily taken for one of the family, by their `model_type`.
    others: Mapping[str, str] = field(default_factory=dict)
    gguf: Architecture | None = None  # of its GGUF files; None: there are none
    mtp: MtpNames | None = None  # of its layers that predict further tokens; None: none is made

    @property
    def architecture(self) -> str:
        """The name of the model in the `architectures` of a config.json."""
        return self.model.partition(":")[2]
