"""The record of gpt-oss."""

from umbra.models.family import Family
from umbra.models.gpt_oss import gguf
from umbra.models.gpt_oss.text import TEXT

GPT_OSS = Family(
    name="gpt_oss",
    config="umbra.models.gpt_oss.config:GptOssConfig",
    model="umbra.models.gpt_oss.model:GptOssForCausalLM",
    gguf=gguf.GPT_OSS,
    text=TEXT,
)
