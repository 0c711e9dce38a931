"""The texts of GLM-4.5 to 4.7, and of Hy3."""

from dataclasses import replace
from typing import Any

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import CL100K, Split

GLM45 = OutputMarks(
    signs=("<tool_call>", "<arg_key>"),
    block="<tool_call>",
    block_end="</tool_call>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    parameter_end="</arg_value>",
    begins_line=True,
)
HY3 = OutputMarks(
    signs=("<tool_sep>", "<arg_key>"),
    block="<tool_calls>",
    block_end="</tool_calls>",
    call="<tool_call>",
    call_end="</tool_call>",
    name_end="<tool_sep>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    parameter_end="</arg_value>",
)
SUFFIX = ":opensource"  # in all marks of later releases
SUFFIXED: dict[str, Any] = {
    name: f"{mark[:-1]}{SUFFIX}>" for name, mark in vars(HY3).items() if isinstance(mark, str) and mark[-1:] == ">"
}
HY3_SUFFIXED = replace(HY3, signs=("<tool_sep", SUFFIX), **SUFFIXED)
TEXT = Conventions(
    formats={"hy3_opensource": HY3_SUFFIXED, "hy3": HY3, "glm45": GLM45},  # Hy3's marks are among GLM's signs
    splits={
        "chatglm-bpe": Split((CL100K,)),
        "glm4": Split((CL100K,), whole=True),
        "glm5": Split((CL100K,), whole=True),
    },
)
