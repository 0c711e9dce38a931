"""The record of a model family: all that is particular to it beside its config and its model. Records need no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from umbra.models.gguf.architecture import Architecture
from umbra.models.mtp_names import MtpNames
from umbra.text.conventions import Conventions


@dataclass(frozen=True)
class QuantisedFiles:
    """The layout of a family's quantised checkpoints: the modules that stay in floats."""

    floats: tuple[str, ...]  # modules of a layer that are never quantised, by their paths in it: routers and small ones
    # The modules of a layer that official files in FP8 list; None: `floats`.
    fp8_floats: tuple[str, ...] | None = None
    fp8_anywhere: tuple[str, ...] = ("lm_head",)  # other names that they list
    fp8_type: str = "e4m3"  # their name of the weights' type


class Shape(NamedTuple):
    """The sizes of a published model, for benchmarks."""

    layers: int
    hidden: int
    inner: int  # of an expert
    experts: int
    top_k: int


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
    text: Conventions = field(default_factory=Conventions)  # what no other family's record says already
    mtp: MtpNames | None = None  # of its layers that predict further tokens; None: none is made
    quantised: QuantisedFiles | None = None  # None: its files have all experts in one tensor, and become MXFP4 alone
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of published models, by their names

    @property
    def architecture(self) -> str:
        """The name of the model in the `architectures` of a config.json."""
        return self.model.partition(":")[2]
