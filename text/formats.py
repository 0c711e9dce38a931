"""The ways in which families of models mark reasoning and tool calls in their output: one row for each."""

from dataclasses import dataclass

THINK, THINK_END = "<think>", "</think>"  # the same in every format


@dataclass(frozen=True)
class Format:
    """The marks of one format. A block holds calls, and a call holds parameters; the name of either follows its mark,
    up to `>`. Without a mark for calls, a block holds one call as JSON, {"name": ..., "arguments": {...}}."""

    signs: tuple[str, ...]  # a chat template that has all of these is of this format
    block: str
    block_end: str
    call: str = ""
    call_end: str = ""
    parameter: str = ""
    parameter_end: str = ""


FORMATS = {
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
    ),
    "qwen3": Format(
        signs=("<tool_call>", "arguments"),
        block="<tool_call>",
        block_end="</tool_call>",
    ),
}
# Tokens that a decoder must not drop, although a tokenizer may call them special.
TAGS = frozenset({THINK, THINK_END} | {mark for f in FORMATS.values() for mark in (f.block, f.block_end)})


def choose_format(setting: str, template: str) -> Format | None:
    """The format that `setting` names; for `auto` the first whose signs are in the chat template. None: plain text."""
    if setting == "auto":
        return next((f for f in FORMATS.values() if all(sign in template for sign in f.signs)), None)
    return FORMATS.get(setting)
