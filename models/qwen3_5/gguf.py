"""The GGUF files of dense Qwen3.5, 3.6 and 3.8."""

from umbra.models.gguf.architecture import Architecture
from umbra.models.gguf.names import MLP, Names
from umbra.models.hybrid_config import MTP
from umbra.models.hybrid_gguf import LAYERS, SMALL_PROJECTIONS, read_dense, with_sections, write_dense

QWEN35 = Architecture(
    "qwen35",
    Names({**LAYERS, **MLP, **SMALL_PROJECTIONS}, plus_one=True, mtp=MTP, tiled=True),
    gatings=(),
    read=read_dense,
    write=with_sections(write_dense),
    partial=True,
)
