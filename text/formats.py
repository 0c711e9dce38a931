"""Describes how a model marks reasoning and tool calls in its output. Families' records have their formats; of the two
here the mechanism itself reads one and falls back on the other."""

import re
from dataclasses import dataclass

SIGN = re.compile(r"<[|｜].*?[|｜]>|\[[A-Z_]+\]")  # a mark in a text
THINK, THINK_END = "<think>", "</think>"  # of most formats whose marks are text
# Tokens of harmony, the format whose marks are special tokens (text/harmony.py).
START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"


class Mark(str):
    """A token that is a mark by its id, as the text that stands for it."""

    __slots__ = ()


@dataclass(frozen=True)
class OutputMarks:
    """The marks of one format. A block holds calls, and a call holds parameters; the name of either follows its mark,
    up to `>`. Without a mark for calls, a block is one call: its name, then parameters; or, without a mark for
    parameters too, JSON, {"name": ..., "arguments": {...}}. Where such a block has no mark at its end, it has one call
    or several, also in a list, and goes on to the end of the answer. With a mark for calls but none for parameters, a
    call is its name and its arguments, a JSON object; without a block such calls follow one another."""

    signs: tuple[str, ...]  # a chat template that has all of these is of this format
    block: str = ""
    block_end: str = ""
    call: str = ""
    call_end: str = ""
    name_end: str = ">"  # of the name of a call that has parameters
    parameter: str = ""
    parameter_end: str = ""
    key_end: str = ">"  # of the name of a parameter
    value: str = ""  # opens its value
    value_lines: bool = False  # a value stands on lines of its own
    before_name: str = ""  # within a call whose arguments are JSON
    id_mark: str = ""  # between the name of a call whose arguments are JSON and its id, which need not be there
    short_ids: bool = False  # a conversation's calls have ids of nine letters and digits
    numbered: bool = False  # `:` and its number among the conversation's calls follow the name: all that is its id
    before_arguments: str = ""
    after_arguments: str = ""
    other_block: str = ""  # another spelling of `block`, which models write too
    other_block_end: str = ""
    bare: bool = False  # calls in JSON that an answer begins with need no mark
    arguments: str = "arguments"  # their name in a call in JSON
    listed: bool = False  # calls in JSON are in a list
    alone: bool = False  # a message of a conversation has one call and nothing else
    begins_line: bool = False  # an answer begins with a line break, which is layout
    tokens: tuple[str, ...] = ()  # instead of all these: special tokens that are marks by their ids (text/harmony.py)
    quote: str = ""  # arguments are no JSON: keys are bare, and a string stands between two of these
    think: str = THINK  # opens reasoning
    think_end: str = THINK_END
    ends: tuple[str, ...] = ()  # tokens that end an answer, whatever else a checkpoint says

    @property
    def marks(self) -> tuple[str, ...]:
        own = (self.block, self.block_end, self.call, self.call_end, self.parameter, self.parameter_end, self.value)
        others = self.other_block, self.other_block_end, self.id_mark, self.quote
        within = SIGN.findall(self.before_name + self.before_arguments)
        ends = (end.removeprefix(">") for end in (self.key_end, self.name_end))
        return tuple(mark for mark in (*own, *ends, *others, *within) if mark)

    @property
    def block_is_call(self) -> bool:
        return bool(self.parameter) and not self.call

    @property
    def call_is_json(self) -> bool:
        return bool(self.call) and not self.parameter

    @property
    def thoughts(self) -> tuple[str, str]:
        """The tokens that begin the marks of reasoning."""
        return (f"{self.think.partition('>')[0]}>" if ">" in self.think else self.think), self.think_end

    @property
    def to_the_end(self) -> bool:
        """Says whether calls go on to the end of the answer."""
        return bool(self.block) and not (self.block_end or self.call)

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block, self.other_block)))

    @property
    def block_ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block_end, self.other_block_end)))


HARMONY = OutputMarks(
    signs=(CHANNEL, MESSAGE),
    tokens=(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN),
    ends=(RETURN, CALL, "<|endoftext|>"),
)
JSON_CALLS = OutputMarks(signs=("<tool_call>", "arguments"), block="<tool_call>", block_end="</tool_call>")
