"""The mutants of a C++ file: one token or statement changed each. Sources are formatted by clang-format, so that binary
operators have spaces around them and template brackets have none.

Not changed: comments, strings, preprocessor lines, static_assert, the text of errors, and orders of memory, which an
x86 processor does not tell apart (docs/reliability.md, "Races and ordering").
"""

import re
from dataclasses import dataclass
from pathlib import Path

from files import ROOT

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*",
    "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&", "&&": "||", "||": "&&", "+=": "-=",
    "-=": "+=", "*=": "/=",
    "|=": "&=", "&=": "|=", "<<=": ">>=", ">>=": "<<=",
}  # fmt: skip
HIDDEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"
    r"|static_assert\([^;]*;|throw [^;]*;|__attribute__\(\([^)]*\)\)|^using [^;]*;|^template[^\n]*",
    re.S | re.M,
)
OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||<<=|>>=|<<|>>|\+=|-=|\*=|\|=|&=|[-<>+*/%&|^])(?= )")
NUMBER = re.compile(r"(?<![\w.])(?:\d+)(?![\w.])")
TRUTH = re.compile(r"\b(?:true|false)\b")
CONDITION = re.compile(r"\bif \(")
CALL = re.compile(r"^[ \t]+(?!return\b|delete\b|throw\b|else\b)[\w:]+(?:(?:\.|->)\w+)*\([^;{}]*\);$", re.M)
JUMP = re.compile(r"\b(?:continue|break|return);")


@dataclass(frozen=True)
class NativeMutant:
    path: str  # relative to the root
    line: int
    start: int
    end: int
    new: str
    shown: str  # the line with what was changed, and its change

    @property
    def name(self) -> str:
        return f"{self.path} | {self.shown}"


def native_mutants(path: Path, root: Path = ROOT) -> list[NativeMutant]:
    text = path.read_text()
    code = HIDDEN.sub(lambda m: re.sub(r"[^\n]", "\0", m[0]), text)
    found: list[tuple[int, int, str]] = []
    for match in OPERATOR.finditer(code):
        found.append((*match.span(), SWAPS[match[0]]))
    for match in NUMBER.finditer(code):
        found.append((*match.span(), str(int(match[0]) + 1)))
    for match in TRUTH.finditer(code):
        found.append((*match.span(), "false" if match[0] == "true" else "true"))
    for match in CONDITION.finditer(code):
        end = _closing(code, match.end() - 1)
        found.append((match.end(), end, f"!({text[match.end() : end]})"))
    for match in CALL.finditer(code):
        found.append((match.start() + len(match[0]) - len(match[0].lstrip()), match.end(), ";"))
    for match in JUMP.finditer(code):
        found.append((*match.span(), {"continue;": "break;", "break;": "continue;", "return;": ";"}[match[0]]))
    return [_mutant(path.relative_to(root).as_posix(), text, *change) for change in sorted(found)]


def _closing(code: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if not depth:
            return place
    raise ValueError("a bracket is not closed")


def _mutant(path: str, text: str, start: int, end: int, new: str) -> NativeMutant:
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    before = " ".join((text[first:start] + "[" + text[start:end] + "]" + text[end:last]).split())
    line = text.count("\n", 0, start) + 1
    return NativeMutant(path, line, start, end, new, f"{before} -> {' '.join(new.split())}")
