"""The texts of Mistral's models and of Llama 3."""

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import CL100K, LOWER, OTHER, SPACES, UPPER, WORD, Split

TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}|{OTHER}[\r\n/]*{SPACES}"
MISTRAL = OutputMarks(signs=("[TOOL_CALLS]", "[ARGS]"), call="[TOOL_CALLS]", before_arguments="[ARGS]")
TEXT = Conventions(
    formats={"mistral": MISTRAL},
    splits={"llama-bpe": Split((CL100K,), whole=True, bos=True), "tekken": Split((TEKKEN,), whole=True, bos=True)},
)
