"""The record of MiniMax-M2: M2, M2.1, M2.5 and M2.7."""

from umbra.models.family import Family, QuantisedFiles, Shape
from umbra.models.minimax_m2 import gguf
from umbra.models.minimax_m2.text import TEXT

MINIMAX_M2 = Family(
    name="minimax_m2",
    config="umbra.models.minimax_m2.config:MiniMaxM2Config",
    model="umbra.models.minimax_m2.model:MiniMaxM2ForCausalLM",
    old_types=("minimax",),
    aliases={"mlp": "block_sparse_moe"},
    others={
        "minimax": "MiniMax-01",
        "minimax_text_01": "MiniMax-01",
        "minimax_m1": "MiniMax-M1",
        "minimax_m3": "MiniMax-M3",
        "minimax_m3_vl": "MiniMax-M3",
    },
    gguf=gguf.MINIMAX_M2,
    text=TEXT,
    quantised=QuantisedFiles(
        ("block_sparse_moe.gate",), (), ("gate", "e_score_correction_bias", "lm_head"), "float8_e4m3fn"
    ),
    shapes={"MiniMax-M2": Shape(62, 3072, 1536, 256, 8)},
)
