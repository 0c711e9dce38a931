"""Reads the value of a parameter, text that may have the marks of calls in it.

Models write files and commands about tool calls, and forget marks. So a mark that closes ends a value only if nothing
but white space stands between it and another mark, as in an answer that is written well, or if the output ends. A call
in a block, both on lines of their own, is an example.
"""

from io import StringIO

from umbra.text.formats import OutputMarks
from umbra.text.tool_arguments import unwrapped

LONGEST_VALUE = 1 << 22  # characters of one parameter, or of one call in JSON
LONGEST_LAYOUT = 16  # characters between the name of a parameter and the mark of its value


class Value:
    """The value of the parameter `key`. `opened`: the mark that opens a value was there."""

    def __init__(self, format: OutputMarks, key: str, opened: bool):
        self.key = key
        self.closing = ""  # a mark that ends the value, if another mark follows
        self._format, self._opened = format, opened
        call = format.call, format.block
        # For each mark that closes, the marks of which one must follow.
        self._followers = {
            format.parameter_end: (format.parameter, format.call_end, format.block_end, *call),
            format.call_end: (format.block_end, *call),
            format.block_end: call,
        }
        self._start()

    def _start(self) -> None:
        self._text, self._first, self._last, self.closing = StringIO(), "", "", ""
        self._end, self._on_line = 0, False  # where `closing` begins, and whether a line does there
        self._block, self._example = False, False  # whether a block was opened on its own line; within an example

    def take(self, text: str, mark: str) -> str:
        """Takes the text up to `mark`, which may be empty. Returns the mark that has ended the value, which is `mark`
        if a parameter begins there and else one before it; empty: the value goes on."""
        format = self._format
        if text.strip():
            self.closing, self._block = "", False
        self._write(text)
        if not mark:
            return ""
        begins_line = self._last == "\n"
        example = self._example or (self._block and begins_line and mark == format.call)
        self._example = example and mark != format.block_end
        self._block = begins_line and mark == format.block
        if self.closing and mark in self._followers[self.closing]:
            return self.closing
        if mark == format.value and not (self._opened or self._has_text):
            self._opened = True
            self._start()
            return ""
        if example:
            self.closing = ""
        elif mark == format.parameter and (begins_line or self._first != "\n"):
            self._end = self._text.tell()
            return mark
        elif mark not in self._followers:
            self.closing = ""
        elif mark != self.closing or not self._on_line:  # of two equal ones, the first if it stands on its own line
            self.closing, self._end, self._on_line = mark, self._text.tell(), begins_line
        self._write(mark)
        return ""

    @property
    def text(self) -> str | None:
        """The value without the newlines of its layout; None if it is too long."""
        text, format = self._text.getvalue()[: self._end], self._format
        if len(text) > LONGEST_VALUE:
            return None
        if self._opened:
            return text
        return text.removeprefix("\n") if format.value else unwrapped(text, format.value_lines)

    @property
    def _has_text(self) -> bool:
        return self._text.tell() > LONGEST_LAYOUT or bool(self._text.getvalue().strip())

    def _write(self, text: str) -> None:
        self._first, self._last = self._first or text[:1], text[-1:] or self._last
        if self._text.tell() <= LONGEST_VALUE:  # one that is longer is dropped, so the rest of it is not needed
            self._text.write(text)
