"""The toy family's texts: every word and every other character is a part, and calls stand in curly marks."""

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import Split

EXPRESSION = r"\p{L}+|\P{L}"
FORMAT = OutputMarks(
    signs=("<toy:calls>",),
    block="<toy:calls>",
    block_end="</toy:calls>",
    call="<toy:call>",
    call_end="</toy:call>",
    before_arguments="<toy:with>",
)
TEXT = Conventions(formats={"toy": FORMAT}, splits={"toy-words": Split((EXPRESSION,))}, ends=("<toy:end>",))
