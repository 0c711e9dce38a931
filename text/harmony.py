"""Reads answers in the format harmony, which are messages: a header, and a text for one of the channels or for a tool.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The recipient may stand in either part of the header, and the first `<|start|>assistant` is the end of the prompt. Marks
are special tokens, which come as `Mark`; the same letters as ordinary tokens are text. Models leave marks out and write
other words into headers: what is no header is text, and nothing is lost.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from umbra.text.answer import Part, Reader
from umbra.text.formats import CALL, CHANNEL, CONSTRAIN, MESSAGE, START, THINK, THINK_END, Mark

LONGEST_HEADER = 256  # characters; what is longer is text
SHORT = 16  # characters of a text without marks that may become a header
ADDRESSED = re.compile(r"\s*(assistant)?\s*to=")
ROLE = re.compile(r"\s*(?:assistant)?\s*(?:to=\S*\s*)?")
NAMED = re.compile(r"(?:\W*(analysis|commentary|final)(?![a-z]))?")
HEAD = re.compile(r"(?:\W*(?:analysis|commentary|final|assistant|functions\.\S*)(?![a-z]))?(?:\s*to=[^\s<]*)?")
RECIPIENT = re.compile(r"(?<!\w)to=(functions\.)?([^\s<]*)")
TYPE = re.compile(r"\s*(?:json|code)?(?![a-z])\s*")
BEGUN = re.compile(r"\W*\w*\s*(?:to=\S*)?\s*\w*")  # a header so far
Body = Literal["reasoning", "content", "arguments", "dropped"]


class Harmony(Reader):
    """Reads an output of marks and texts."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), split: bool = True):
        """`tools` are those of the chat; without any, texts for tools are content. Without `split`, reasoning stays in
        the content, between the marks that other formats have for it."""
        self._tools, self._split = {tool["function"]["name"] for tool in tools}, split
        self._body: Body | None = None  # of the message that is read; None: its header is read
        self._thinks = False  # the body is reasoning that stays in the content
        self._header = {"": ""}  # its parts by the marks before them
        self._parts: list[Part] = []
        self._said: set[Body] = set()  # kinds of bodies that had text
        self._first = True  # the body has no text yet

    def push(self, text: str) -> list[Part]:
        if isinstance(text, Mark):
            self._mark(text)
        elif self._body:
            self._say(text)
        else:
            self._extend(text)
        return self._take()

    def finish(self, cut: bool = False) -> list[Part]:
        if not (cut and not self._body and self._begun()):
            self._end("", cut)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _mark(self, mark: Mark) -> None:
        if mark in (MESSAGE, CONSTRAIN) and self._body:
            return
        if mark == MESSAGE:
            self._check_role()
            self._open()
        elif mark == CONSTRAIN or (mark == CHANNEL and not self._body):
            self._check_role()
            before = self._header.pop(mark, "")
            self._header[mark] = f"{before} "[:LONGEST_HEADER] if before else ""
        else:
            self._end(mark)
            if mark in (START, CHANNEL):
                self._header[mark] = ""

    def _extend(self, text: str) -> None:
        """More of a header, as far as it may be one."""
        last = next(reversed(self._header))
        room = max(0, LONGEST_HEADER - sum(map(len, self._header.values())))
        self._header[last] += text[:room]
        begun = self._header[last][:SHORT]
        if len(text) > room or (not last and len(self._header[""]) > SHORT and not ADDRESSED.match(begun)):
            self._break(always=True)
            self._say(text[room:])

    def _check_role(self) -> None:
        """Ends the header as plain text if it begins with text that cannot be a role."""
        if len(self._header) == 1 and not ROLE.fullmatch(self._header[""]):
            self._end("")

    def _begun(self) -> bool:
        """Returns whether the text so far can still be the beginning of a header."""
        named = self._header.get(CHANNEL, self._header.get(START))
        if named is None:
            return ROLE.fullmatch(self._header[""]) is not None
        return bool(BEGUN.fullmatch(named) and BEGUN.fullmatch(self._header.get(CONSTRAIN, "")))

    def _end(self, mark: str, cut: bool = False) -> None:
        """The message ends, or `mark` ends what looked like a header. A call that was `cut` off may have no
        arguments."""
        if not self._body:
            self._break(always=mark == CALL and self._function() in self._tools)
        if self._body == "arguments":
            self._parts += [*([Part("arguments", "{}")] if self._first and not cut else []), Part("end")]
        elif self._thinks and not self._first:
            self._parts.append(Part("content", THINK_END))
        self._body, self._header, self._thinks = None, {"": ""}, False

    def _break(self, always: bool) -> None:
        """A header has no end: what does not belong to it is the body. `always`: also if that is nothing."""
        text = self._header[""]
        if len(self._header) == 1:
            always = always or not ROLE.fullmatch(text)
            self._header = {"": ""}
        else:
            text = HEAD.sub("", self._header.get(CHANNEL, self._header.get(START, "")), count=1)
            text += self._header.get(CONSTRAIN, "")
            text = TYPE.sub("", text, count=1) if self._function() else text
        if always or text.strip():
            self._open()
            self._say(text)

    def _function(self) -> str | None:
        """The name of the function that the header calls; None: it calls none."""
        recipient = RECIPIENT.search(" ".join(self._header.values()))
        return recipient[2] if recipient and self._tools and (recipient[1] or recipient[2] in self._tools) else None

    def _open(self) -> None:
        """A body begins."""
        named, function = NAMED.match(self._header.get(CHANNEL, "")), self._function()
        self._first, self._thinks = True, False
        if function and function in self._tools:
            self._body = "arguments"
            self._parts.append(Part("call", function))
        elif function is not None:
            self._body = "dropped"
        elif named and named[1] == "analysis":
            self._body, self._thinks = ("reasoning", False) if self._split else ("content", True)
        else:
            self._body = "content"

    def _say(self, text: str) -> None:
        body = self._body
        if not text or not body or body == "dropped":
            return
        if self._first:
            text = text.lstrip() if body == "arguments" else text
            if not text:
                return
            text = "\n" * (body in self._said and body != "arguments") + THINK * self._thinks + text
            self._first = False
            self._said.add(body)
        self._parts.append(Part(body, text))
