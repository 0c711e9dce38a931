"""The GGUF files of Qwen3.5-MoE and Qwen3.6-MoE."""

from umbra.models.gguf.architecture import SOFTMAX, Architecture
from umbra.models.gguf.names import Names
from umbra.models.hybrid_config import MTP
from umbra.models.hybrid_gguf import SMALL_PROJECTIONS, TENSORS, read, with_sections, write

QWEN35MOE = Architecture(
    "qwen35moe",
    Names({**TENSORS, **SMALL_PROJECTIONS}, plus_one=True, mtp=MTP, tiled=True),
    gatings=(SOFTMAX,),
    read=read,
    write=with_sections(write),
    partial=True,
)
