"""The conventions of published models' texts. Families' records have them; what reads texts is given those of all."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from umbra.text.formats import THINK, THINK_END, OutputMarks
from umbra.text.splits import Split


@dataclass(frozen=True)
class Conventions:
    formats: Mapping[str, OutputMarks] = field(default_factory=dict)  # of outputs, by their names
    splits: Mapping[str, Split] = field(default_factory=dict)  # by llama.cpp's name of the tokenizer
    # The expressions that split a text, by the class of tokenizers that ship as tiktoken.model.
    classes: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()  # tokens that end an answer in any model that has them

    def __or__(self, other: "Conventions") -> "Conventions":
        """Returns both."""
        return Conventions(
            {**self.formats, **other.formats},
            {**self.splits, **other.splits},
            {**self.classes, **other.classes},
            (*self.ends, *other.ends),
        )

    @property
    def tags(self) -> frozenset[str]:
        """The marks that a decoder must not drop, although a tokenizer may call them special."""
        own = (mark for format in self.formats.values() for mark in (*format.thoughts, *format.marks))
        return frozenset({THINK, THINK_END}).union(own)

    @property
    def expressions(self) -> frozenset[str]:
        """All expressions, whose matches take a number of steps in proportion to their length."""
        return frozenset(self.classes.values()).union(*(split.expressions for split in self.splits.values()))

    def format_of_tokens(self, special: Container[str]) -> OutputMarks | None:
        """Returns the format whose marks are special tokens, if all of them are among `special`."""
        return next(
            (f for f in self.formats.values() if f.tokens and all(token in special for token in f.tokens)), None
        )

    def format_of_template(self, template: str, by_tokens: OutputMarks | None) -> OutputMarks | None:
        """Returns the format whose signs are all in a chat template, of several one that says more than calls in JSON.
        `by_tokens` is the one of the tokenizer's special tokens: no other of that kind is chosen."""
        fitting = [f for f in self.formats.values() if all(sign in template for sign in f.signs)]
        fitting = [f for f in fitting if not f.tokens or f is by_tokens]
        return next((f for f in fitting if f.parameter or f.call or f.tokens), next(iter(fitting), None))
