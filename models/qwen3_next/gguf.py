"""Qwen3-Next's GGUF files."""

from umbra.models.gguf.architecture import SOFTMAX, Architecture
from umbra.models.gguf.names import Names
from umbra.models.hybrid_config import MTP
from umbra.models.hybrid_gguf import TENSORS, read, write

NAMES = {**TENSORS, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
QWEN3NEXT = Architecture(
    "qwen3next",
    Names(NAMES, plus_one=True, mtp=MTP),
    gatings=(SOFTMAX,),
    read=read,
    write=write,
    assumed="norm_topk_prob true",
    partial=True,
)
