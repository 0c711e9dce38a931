"""Splits a model's output into reasoning, content and tool calls while it is generated.

Text comes in pieces that may end anywhere, also within a mark; parts go out as soon as they are certain. How the text
is cut into pieces changes only how reasoning and content are cut into parts. docs/text.md has the rules.

The parser is in one state at a time, which has a few marks, all of literal text. It looks for the first of them, passes
the text before it on, and holds back only a tail that may become a mark. So every character is looked at a bounded
number of times, and only a tail of a mark's length, a name, or the value that is being read is kept.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from io import StringIO
from typing import Any

from umbra.text.answer import Part, Reader
from umbra.text.formats import OutputMarks
from umbra.text.harmony import Harmony
from umbra.text.json_calls import LONGEST_BEGIN, LONGEST_NAME, Call, cut_call, may_be_call, read_call, read_calls
from umbra.text.tool_arguments import Tool, to_json, tools_by_name
from umbra.text.values import LONGEST_VALUE, Value

TOOL_NAME = re.compile(r"\s*([\w.-]*)\s*")


class ParserState(Enum):
    REASONING = auto()
    CONTENT = auto()
    OPEN = auto()  # after the mark of a block, of which only white space and a call make a block
    BLOCK = auto()  # between the calls of a block; text here is dropped. Calls in JSON are in no block
    NAME = auto()  # after the mark of a call or a parameter, up to `>`
    CALL = auto()  # between the parameters of a call; text here is dropped
    VALUE = auto()
    JSON = auto()  # a call in JSON
    STRING = auto()  # a string in it: marks do not count here


class Marks:
    """The marks that end the text of a state, whichever comes first. All but single characters begin with `<`, `[` or
    a backslash; no mark is the beginning of another."""

    def __init__(self, marks: tuple[str, ...]):
        marks = tuple(filter(None, marks))
        self.marks, self.longest = marks, max(map(len, marks), default=0)
        self.pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")

    def tail(self, text: str, start: int) -> int:
        """Returns where in `text[start:]`, which has no mark, one may have begun."""
        start = max(start, len(text) - self.longest + 1)
        begin = max(text.rfind(first, start) for first in "<[\\")
        return begin if begin >= 0 and any(m.startswith(text[begin:]) for m in self.marks) else len(text)


@lru_cache
def _marks(format: OutputMarks, tools: bool, split: bool) -> dict[ParserState, Marks]:
    blocks = format.blocks if tools else ()
    calls = (*blocks, *format.block_ends, format.call) if tools and format.call else blocks
    around = (*format.blocks, *format.block_ends)
    inner = (format.parameter, format.call, format.call_end, format.block, format.block_end)
    title: tuple[str, ...] = (">", "<", "\n")
    if format.block_is_call or format.name_end != ">":
        title = *format.marks, format.think, format.think_end
    return {
        ParserState.REASONING: Marks((format.think, format.think_end, *(blocks or calls))),
        ParserState.CONTENT: Marks((*((format.think_end,) if split else ()), *calls)),
        ParserState.OPEN: Marks((*around, format.call or "{")),
        ParserState.BLOCK: Marks((format.call, format.block_end)),
        ParserState.NAME: Marks(title),
        ParserState.CALL: Marks(inner),
        ParserState.VALUE: Marks((format.parameter_end, format.value, *inner)),
        ParserState.JSON: Marks((*around, format.call, format.call_end, format.think_end, format.quote or '"')),
        # JSON has no line break in a string, so one ends a broken one.
        ParserState.STRING: Marks((format.quote,) if format.quote else ("\\\\", '\\"', '"', "\n")),
    }


class Parser(Reader):
    """Reads an output whose marks are text."""

    def __init__(
        self,
        format: OutputMarks | None,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning: bool = False,
        split: bool = True,
    ):
        """`format` None makes everything content. `tools` are those of the chat; without any, marks of calls are text.
        `reasoning` says that the prompt ended within it. Without `split`, reasoning stays in the content, after the
        mark that opens it."""
        self._format = format or OutputMarks((), "", "")
        self._tools = tools_by_name(tools) if format else {}
        self._plain = format is None
        self._marks = _marks(self._format, bool(self._tools), split)
        braces = ("{",) if self._tools and self._format.bare else ()
        content = (*self._marks[ParserState.CONTENT].marks, *braces)
        self._first = Marks((self._format.think, *content))  # content that may still open reasoning
        closers = (self._format.call_end, self._format.parameter_end) if self._tools and self._format.call else ()
        self._behind = Marks((*content, *closers))  # content behind a mark
        self._fresh = split and not reasoning
        self._state = ParserState.REASONING if reasoning and split else ParserState.CONTENT
        self._parts = [Part("content", self._format.think)] if format and reasoning and not split else []
        self._buffer, self._at = "", 0  # the text that is held back is self._buffer[self._at:]
        self._newlines = 0  # held back: they are layout if a mark follows
        # Newlines here are layout: a mark came before.
        self._trim = self._state is ParserState.REASONING or self._format.begins_line or bool(braces)
        self._outer = ParserState.CONTENT  # where the text goes on after a call
        self._opener, self._name = "", ""  # the mark and the text of state NAME
        self._tool: Tool | None = None  # of the call that is read; None: it is dropped
        self._given: set[str] = set()  # its parameters so far
        self._text = StringIO()  # of states OPEN, JSON and STRING
        self._certain = True  # that the text of these is no other text
        self._value = Value(self._format, "", False)  # of the parameter that is read

    def push(self, text: str) -> list[Part]:
        if self._plain:
            return [Part("content", text)] if text else []
        self._buffer, self._at = self._buffer[self._at :] + text, 0
        while self._advance():
            pass
        return self._take()

    def finish(self, cut: bool = False) -> list[Part]:
        """Returns what is left when the output has ended. What was held back was no mark; an open call ends with the
        parameters that it has. `cut` says that the limit of tokens has ended the output: an open call then has as much
        of its arguments as there is, and does not end their object."""
        if self._state is ParserState.VALUE and (
            closing := self._value.closing
        ):  # what was held back began another mark
            self._end_value()
            self._between_parameters(closing)
            self._at = len(self._buffer)
        while self._at < len(self._buffer):
            text, self._at = self._buffer[self._at :], len(self._buffer)
            self._step(text, "")
        if self._state is ParserState.NAME and self._opener == self._format.block:
            self._end_name("", cut)
        if self._state in (ParserState.JSON, ParserState.STRING) and not (cut and self._end_cut()):
            self._end_json("")
        self._end_call(cut)
        if self._newlines and self._state in (ParserState.REASONING, ParserState.CONTENT):
            self._emit(self._state, "\n" * self._newlines)
            self._newlines = 0
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _advance(self) -> bool:
        """Pass on the text up to the next mark of this state, or all that is certain; False if more text is needed."""
        state, fresh = self._state, self._fresh
        marks = self._marks[state]
        if state is ParserState.CONTENT and (fresh or self._trim):
            marks = self._first if fresh else self._behind
        mark = marks.pattern.search(self._buffer, self._at)
        end = mark.start() if mark else marks.tail(self._buffer, self._at)
        text, self._at = self._buffer[self._at : end], mark.end() if mark else end
        self._step(text, mark[0] if mark else "")
        return mark is not None or (state, fresh) != (self._state, self._fresh)

    def _step(self, text: str, mark: str) -> None:
        """Take the text of the current state up to `mark`, which ends it; an empty mark is none."""
        state, format = self._state, self._format
        if state is ParserState.REASONING:
            self._say(state, text)
            if mark == format.think_end:
                self._turn(ParserState.CONTENT)
            elif mark in format.blocks:
                self._open_block(state, mark)
            elif mark and mark == format.call:
                self._open_json(mark, state)
        elif state is ParserState.CONTENT:
            self._say(state, text)
            if mark == format.think and self._fresh:
                self._turn(ParserState.REASONING)
            elif mark == "{" and (self._fresh or self._trim):
                self._open_json("", state)
                self._write(mark)
            elif mark in (format.think, "{"):  # after content it is text
                self._say(state, mark)
            elif mark in format.blocks:
                self._open_block(state, mark)
            elif mark and mark == format.call:
                if format.call_is_json:
                    self._open_json(mark, state)
                else:
                    self._open_name(mark, state)
            elif (
                mark and mark in (format.call_end, format.parameter_end) and not self._trim
            ):  # after content it is text
                self._say(state, mark)
        elif state is ParserState.OPEN:
            if text.strip() or mark in format.blocks:  # it was no block but text, and so is what follows
                self._state = self._outer
                self._say(self._outer, self._opener + self._text.getvalue())
                self._at -= len(text) + len(mark)
            elif mark in format.block_ends:
                self._turn(ParserState.CONTENT)
            elif mark and mark == format.call:
                if format.call_is_json:
                    self._open_json(self._opener + self._text.getvalue() + text + mark, self._outer)
                else:
                    self._open_name(mark, ParserState.BLOCK)
            else:
                self._write(text + mark)
                self._state = ParserState.JSON if mark else state
        elif state is ParserState.BLOCK:
            if mark == format.call:
                self._open_name(mark, state)
            elif mark:
                self._turn(ParserState.CONTENT)
        elif state is ParserState.NAME:
            self._name += text
            wrong = self._opener == format.block and not TOOL_NAME.fullmatch(self._name)
            if mark or wrong or len(self._name) > LONGEST_NAME:
                self._end_name(mark)
        elif state is ParserState.CALL:
            self._between_parameters(mark)
        elif state is ParserState.VALUE:
            if ended := self._value.take(text, mark):
                self._end_value()
                self._between_parameters(ended)
                if ended != format.parameter:
                    self._at -= len(mark)  # it counts in the state after
        elif state is ParserState.STRING:
            self._write(text + mark)
            self._state = ParserState.JSON if mark in (format.quote or '"', "\n") else state
            self._doubt()
        else:
            self._write(text)
            if mark == (format.quote or '"'):
                self._write(mark)
                self._state, mark = ParserState.STRING, ""
            if not self._doubt(mark) and mark:
                self._end_json(mark)

    def _say(self, state: ParserState, text: str) -> None:
        """Reasoning or content, without the newlines that are layout."""
        if self._trim:
            text = text.lstrip("\n")
        if not text:
            return
        self._trim = False
        if state is ParserState.CONTENT and text.strip():
            self._fresh = False
        layout = state is ParserState.REASONING or self._fresh or bool(self._tools)  # if a mark of a section may follow
        said = text.rstrip("\n") if layout else text
        if said:
            self._emit(state, "\n" * self._newlines + said)
            self._newlines = 0
        self._newlines += len(text) - len(said)

    def _emit(self, state: ParserState, text: str) -> None:
        self._parts.append(Part("reasoning" if state is ParserState.REASONING else "content", text))

    def _turn(self, state: ParserState) -> None:
        """A mark ends the text before it, and another state begins."""
        self._state, self._newlines, self._trim, self._fresh = state, 0, True, False

    def _open_block(self, outer: ParserState, mark: str) -> None:
        if self._format.block_is_call:
            self._open_name(mark, outer)
        elif self._format.to_the_end:
            self._open_json(mark, outer)
        else:
            self._state, self._outer, self._opener, self._text = ParserState.OPEN, outer, mark, StringIO()

    def _open_json(self, opener: str, outer: ParserState) -> None:
        self._state, self._outer, self._opener, self._text = ParserState.JSON, outer, opener, StringIO()
        self._certain = bool(opener)

    def _open_name(self, mark: str, outer: ParserState) -> None:
        self._state, self._outer, self._opener, self._name = ParserState.NAME, outer, mark, ""

    def _end_name(self, mark: str, cut: bool = False) -> None:
        """`mark` ends a name; an empty one says that it is none, or that the output has ended."""
        format, name, opener, outer = self._format, self._name.strip(), self._opener, self._outer
        if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
            name = name[1:-1]
        good = bool(name) and len(self._name) <= LONGEST_NAME
        if opener == format.parameter:
            if good and mark and mark in (format.key_end, format.value):
                self._state, self._value = ParserState.VALUE, Value(format, name, mark == format.value)
                return
            self._state = ParserState.CALL
        elif opener == format.block:
            ends = cut or mark in (format.parameter, format.block_end) or (not mark and name in self._tools)
            if good and ends and TOOL_NAME.fullmatch(name):
                self._open_call(name)
            else:
                self._state = outer
                self._say(outer, opener + self._name)
        elif good and mark == format.name_end and (name in self._tools or outer is ParserState.BLOCK):
            self._open_call(name)
            return
        else:
            self._state = outer
            if outer is ParserState.CONTENT:  # no call, so it is text
                self._say(outer, opener + self._name)
        self._at -= len(mark)  # it counts in the state after

    def _open_call(self, name: str) -> None:
        self._turn(ParserState.CALL)
        self._tool, self._given = self._tools.get(name), set()
        if self._tool:
            self._parts.append(Part("call", name))

    def _between_parameters(self, mark: str) -> None:
        """Handles a mark within a call: that of a parameter begins or ends one, and any other ends the call."""
        format = self._format
        if mark == format.parameter:
            self._state, self._opener, self._name = ParserState.NAME, mark, ""
        elif mark == format.parameter_end:
            self._state = ParserState.CALL
        elif mark:
            self._end_call()
            if mark == format.block:
                self._open_block(ParserState.CONTENT, mark)
            elif mark == format.call:
                self._open_name(mark, self._outer)
            else:
                self._turn(self._outer if mark == format.call_end else ParserState.CONTENT)

    def _end_value(self) -> None:
        key, text = self._value.key, self._value.text
        if self._tool and key not in self._given and text is not None:
            opening = ", " if self._given else "{"
            self._given.add(key)
            value = to_json(self._tool.value(key, text))
            self._parts.append(Part("arguments", f"{opening}{to_json(key)}: {value}"))

    def _end_call(self, cut: bool = False) -> None:
        if self._tool:
            self._parts += [*([] if cut else [Part("arguments", "}" if self._given else "{}")]), Part("end")]
        self._tool = None

    def _write(self, text: str) -> None:
        if self._text.tell() <= LONGEST_VALUE:  # one that is longer is dropped, so the rest of it is not needed
            self._text.write(text)

    def _doubt(self, mark: str = "") -> bool:
        """Takes a call without a mark of its own for text as soon as its beginning is that of no call; `mark` comes
        behind it. -> whether it did"""
        if self._certain:
            return False
        text = self._text.getvalue()
        if may_be_call(text):
            self._certain = len(text) >= LONGEST_BEGIN
            return False
        self._state = self._outer
        self._say(self._outer, text[0])
        self._buffer, self._at = text[1:] + mark + self._buffer[self._at :], 0  # marks count in it
        return True

    def _end_cut(self) -> bool:
        """Ends a call in JSON that was cut off: one of a tool of this chat has the arguments so far, one without its
        whole name is dropped. -> whether it was a call"""
        text, format = self._text.getvalue(), self._format
        calls, text = read_calls(text) if format.to_the_end else ([], text)
        call = cut_call(text, format) if text.strip() or not calls else Call("", "")
        if not call:
            return False
        names = [other.name for other in (*calls, call) if other.name or not (self._opener or calls)]
        if any(name not in self._tools for name in names):
            return False
        self._end_with(*calls, call)
        return True

    def _end_json(self, mark: str) -> None:
        """`mark` or the end of the output ends a call in JSON. One that is none was text."""
        format, text = self._format, self._text.getvalue()
        end = format.call_end or format.block_end
        behind = ""
        if len(text) > LONGEST_VALUE:
            calls = [Call("", "")]
        elif format.to_the_end:
            calls, behind = read_calls(text)
            if not self._opener and any(call.name not in self._tools for call in calls):
                calls = []
        else:
            calls = [call] if (call := read_call(text, format)) else []
        if calls:
            self._end_with(*calls)
            self._say(ParserState.CONTENT, behind)
        else:
            self._state = self._outer
            self._say(self._outer, self._opener + text + (mark if mark and mark == end else ""))
        if mark != end:
            self._at -= len(mark)  # it counts in the state after

    def _end_with(self, *calls: Call) -> None:
        self._turn(ParserState.CONTENT)
        for call in calls:
            if call.name in self._tools:
                arguments = [Part("arguments", call.arguments)] if call.arguments else []
                self._parts += [Part("call", call.name, call.id), *arguments, Part("end")]


def reader(format: OutputMarks | None, tools: Sequence[Mapping[str, Any]], reasoning: bool, split: bool) -> Reader:
    """Returns the reader of answers in `format`; the other arguments are `Parser`'s."""
    return Harmony(tools, split) if format and format.tokens else Parser(format, tools, reasoning, split)
