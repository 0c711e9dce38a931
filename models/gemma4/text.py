"""Gemma 4's texts. Arguments of calls are no JSON: keys are bare and in order, and strings stand between marks."""

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import Split

FORMAT = OutputMarks(
    signs=("<|tool_call>call:", '<|"|>'),
    call="<|tool_call>",
    call_end="<tool_call|>",
    before_name="call:",
    quote='<|"|>',
    think="<|channel>thought",
    think_end="<channel|>",
)
TEXT = Conventions(
    formats={"gemma4": FORMAT},
    splits={"gemma4": Split((r"[^\n]+|\n+",), bos=True)},  # of texts whose spaces are written as another sign
    ends=("<turn|>", "<|tool_response>"),
)
