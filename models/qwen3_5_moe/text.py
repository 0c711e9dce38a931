"""The texts of Qwen3.5-MoE and Qwen3.6-MoE."""

from umbra.text.conventions import Conventions
from umbra.text.splits import ENGLISH, SPACES, WORD, Split

EXPRESSION = rf"{ENGLISH}|{WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{SPACES}"
TEXT = Conventions(splits={"qwen35": Split((EXPRESSION,), composed=True)})
