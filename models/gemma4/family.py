"""The record of Gemma 4."""

from umbra.models.family import Family, QuantisedFiles, Shape
from umbra.models.gemma4.gguf import GEMMA4_GGUF
from umbra.models.gemma4.text import TEXT

GEMMA4 = Family(
    name="gemma4",
    config="umbra.models.gemma4.config:Gemma4Config",
    model="umbra.models.gemma4.model:Gemma4ForCausalLM",
    pictured=("gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    aliases={"model.language_model": "model"},
    gguf=GEMMA4_GGUF,
    text=TEXT,
    quantised=QuantisedFiles(("router.proj",)),
    shapes={"Gemma-4-26B-A4B": Shape(30, 2816, 704, 128, 8)},
)
