"""The texts of Mistral's models and of Llama 3."""

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import CL100K, LOWER, OTHER, SPACES, UPPER, WORD, Split

TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}|{OTHER}[\r\n/]*{SPACES}"
MISTRAL = OutputMarks(
    signs=("[TOOL_CALLS]", "[ARGS]"),
    think="[THINK]",
    think_end="[/THINK]",
    call="[TOOL_CALLS]",
    id_mark="[CALL_ID]",
    before_arguments="[ARGS]",
    short_ids=True,
)
MISTRAL_JSON = OutputMarks(signs=("[TOOL_CALLS]",), block="[TOOL_CALLS]", listed=True, short_ids=True)  # before 2025-06
LLAMA3 = OutputMarks(
    signs=("<|start_header_id|>", '"parameters": '),
    block="<|python_tag|>",
    bare=True,
    arguments="parameters",
    alone=True,
)
TEXT = Conventions(
    formats={"mistral": MISTRAL, "mistral_json": MISTRAL_JSON, "llama3": LLAMA3},
    ends=("<|eot_id|>", "<|eom_id|>"),
    splits={"llama-bpe": Split((CL100K,), whole=True, bos=True), "tekken": Split((TEKKEN,), whole=True, bos=True)},
)
