"""The texts of Qwen3-MoE."""

from umbra.text.conventions import Conventions
from umbra.text.formats import JSON_CALLS, OutputMarks
from umbra.text.splits import CL100K_SINGLE_DIGITS, Split

CODER = OutputMarks(
    signs=("<tool_call>", "<function="),
    block="<tool_call>",
    block_end="</tool_call>",
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    value_lines=True,
)
TEXT = Conventions(
    formats={"qwen3_coder": CODER, "qwen3": JSON_CALLS},
    splits={
        "qwen2": Split((CL100K_SINGLE_DIGITS,), composed=True),
        "deepseek-r1-qwen": Split((CL100K_SINGLE_DIGITS,)),  # of models of this kind that learned from R1
    },
)
