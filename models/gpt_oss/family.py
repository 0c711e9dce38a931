"""The record of gpt-oss."""

from umbra.models.family import Family

GPT_OSS = Family(
    name="gpt_oss",
    config="umbra.models.gpt_oss.config:GptOssConfig",
    model="umbra.models.gpt_oss.model:GptOssForCausalLM",
)
