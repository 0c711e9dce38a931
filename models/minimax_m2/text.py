"""MiniMax-M2's texts."""

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import O200K, Split

FORMAT = OutputMarks(
    signs=("<minimax:tool_call>",),
    block="<minimax:tool_call>",
    block_end="</minimax:tool_call>",
    call="<invoke name=",
    call_end="</invoke>",
    parameter="<parameter name=",
    parameter_end="</parameter>",
)
TEXT = Conventions(formats={"minimax_m2": FORMAT}, splits={"minimax-m2": Split((O200K,))}, ends=("[e~[",))
