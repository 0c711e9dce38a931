"""The ways in which families of models mark reasoning and tool calls in their output: one row for each."""

import re
from collections.abc import Container
from dataclasses import dataclass, replace

SIGN = re.compile(r"<[|｜].*?[|｜]>")  # a mark in a text
THINK, THINK_END = "<think>", "</think>"  # the same in every format whose marks are text
# Tokens of harmony, the format of gpt-oss.
START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"


class Mark(str):
    """A token that is a mark by its id, as the text that stands for it."""

    __slots__ = ()


@dataclass(frozen=True)
class Format:
    """The marks of one format. A block holds calls, and a call holds parameters; the name of either follows its mark,
    up to `>`. Without a mark for calls, a block is one call: its name, then parameters; or, without a mark for
    parameters too, JSON, {"name": ..., "arguments": {...}}. With a mark for calls but none for parameters, a call is
    its name and its arguments, a JSON object."""

    signs: tuple[str, ...]  # a chat template that has all of these is of this format
    block: str = ""
    block_end: str = ""
    call: str = ""
    call_end: str = ""
    parameter: str = ""
    parameter_end: str = ""
    key_end: str = ">"  # of the name of a parameter
    value: str = ""  # opens its value
    value_lines: bool = False  # a value stands on lines of its own
    before_name: str = ""  # within a call whose arguments are JSON
    numbered: bool = False  # `:` and its number among the conversation's calls follow the name: all that is its id
    before_arguments: str = ""
    after_arguments: str = ""
    other_block: str = ""  # another spelling of `block`, which models write too
    other_block_end: str = ""
    begins_line: bool = False  # an answer begins with a line break, which is layout
    tokens: tuple[str, ...] = ()  # instead of all these: special tokens that are marks by their ids (text/harmony.py)
    ends: tuple[str, ...] = ()  # tokens that end an answer, whatever else a checkpoint says

    @property
    def marks(self) -> tuple[str, ...]:
        found = (self.block, self.block_end, self.call, self.call_end, self.parameter, self.parameter_end, self.value)
        others = (self.other_block, self.other_block_end, *SIGN.findall(self.before_name + self.before_arguments))
        return tuple(mark for mark in (*found, self.key_end.removeprefix(">"), *others) if mark)

    @property
    def block_is_call(self) -> bool:
        return bool(self.parameter) and not self.call

    @property
    def call_is_json(self) -> bool:
        return bool(self.call) and not self.parameter

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block, self.other_block)))

    @property
    def block_ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block_end, self.other_block_end)))


DEEPSEEK_V31 = Format(
    signs=("<｜tool▁sep｜>",),
    block="<｜tool▁calls▁begin｜>",
    block_end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    before_arguments="<｜tool▁sep｜>",
)
FORMATS = {
    "harmony": Format(
        signs=(CHANNEL, MESSAGE),
        tokens=(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN),
        ends=(RETURN, CALL, "<|endoftext|>"),
    ),
    "minimax_m2": Format(
        signs=("<minimax:tool_call>",),
        block="<minimax:tool_call>",
        block_end="</minimax:tool_call>",
        call="<invoke name=",
        call_end="</invoke>",
        parameter="<parameter name=",
        parameter_end="</parameter>",
    ),
    "qwen3_coder": Format(
        signs=("<tool_call>", "<function="),
        block="<tool_call>",
        block_end="</tool_call>",
        call="<function=",
        call_end="</function>",
        parameter="<parameter=",
        parameter_end="</parameter>",
        value_lines=True,
    ),
    "glm45": Format(
        signs=("<tool_call>", "<arg_key>"),
        block="<tool_call>",
        block_end="</tool_call>",
        parameter="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        parameter_end="</arg_value>",
        begins_line=True,
    ),
    "kimi_k2": Format(
        signs=("<|tool_calls_section_begin|>",),
        block="<|tool_calls_section_begin|>",
        block_end="<|tool_calls_section_end|>",
        other_block="<|tool_call_section_begin|>",
        other_block_end="<|tool_call_section_end|>",
        call="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        before_name="functions.",
        numbered=True,
        before_arguments="<|tool_call_argument_begin|>",
    ),
    "deepseek_v3": replace(
        DEEPSEEK_V31,
        signs=("<｜tool▁sep｜>", "```json"),
        before_name="function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```",
    ),
    "deepseek_v31": DEEPSEEK_V31,
    "qwen3": Format(signs=("<tool_call>", "arguments"), block="<tool_call>", block_end="</tool_call>"),
}
# Tokens that a decoder must not drop, although a tokenizer may call them special.
TAGS = frozenset({THINK, THINK_END}).union(*(f.marks for f in FORMATS.values()))


def format_of_tokens(special: Container[str]) -> Format | None:
    """The format whose marks are special tokens, if all of them are among `special`."""
    return next((f for f in FORMATS.values() if f.tokens and all(token in special for token in f.tokens)), None)
