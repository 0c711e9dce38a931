"""The records of dense decoders: Qwen3; Qwen2, also 2.5 and QwQ; Llama 2 and 3; Mistral; Ministral; Ministral 3."""

from umbra.models.dense.gguf import LLAMA_FILES, MISTRAL3_FILES, QWEN2_FILES, QWEN3_FILES
from umbra.models.dense.text import TEXT
from umbra.models.family import Family, QuantisedFiles
from umbra.models.gguf.architecture import Architecture
from umbra.text.conventions import Conventions

NOTHING_OWN = Conventions()  # that other records do not say
ALIASES = {"language_model.model": "model", "language_model.lm_head": "lm_head", "model.language_model": "model"}


def record(
    name: str,
    kind: str,
    gguf: Architecture | None = None,
    pictured: tuple[str, ...] = (),
    text: Conventions = NOTHING_OWN,
) -> Family:
    """Returns the record of the family `name`, whose classes begin with `kind`."""
    return Family(
        name=name,
        config=f"umbra.models.dense.config:{kind}Config",
        model=f"umbra.models.dense.model:{kind}ForCausalLM",
        pictured=pictured,
        aliases=ALIASES if pictured else {},
        gguf=gguf,
        text=text,
        quantised=QuantisedFiles(()),
    )


QWEN3 = record("qwen3", "Qwen3", QWEN3_FILES)
QWEN2 = record("qwen2", "Qwen2", QWEN2_FILES)
LLAMA = record("llama", "Llama", LLAMA_FILES, text=TEXT)
MISTRAL = record("mistral", "Mistral", pictured=("mistral3",))
MINISTRAL = record("ministral", "Ministral")
MINISTRAL3 = record("ministral3", "Ministral3", MISTRAL3_FILES, ("mistral3",))
