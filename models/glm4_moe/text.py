"""The texts of GLM-4.5 to 4.7."""

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
TEXT = Conventions(
    formats={"glm45": GLM45},
    splits={
        "chatglm-bpe": Split((CL100K,)),
        "glm4": Split((CL100K,), whole=True),
        "glm5": Split((CL100K,), whole=True),
    },
)
