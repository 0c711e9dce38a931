"""Describes how tokenizers split a text before byte-pair encoding, with the parts of published expressions. A match of
these takes a number of steps in proportion to its length."""

from dataclasses import dataclass

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD, OTHER, SPACES = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The expressions of the encodings with these names, and the first one with each digit apart.
CL100K = rf"{ENGLISH}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}|{OTHER}[\r\n]*{SPACES}"
O200K = rf"{WORD}{UPPER}*{LOWER}+{ENGLISH}?|{WORD}{UPPER}+{LOWER}*{ENGLISH}?|\p{{N}}{{1,3}}|{OTHER}[\r\n/]*{SPACES}"
CL100K_SINGLE_DIGITS = rf"{ENGLISH}|{WORD}\p{{L}}+|\p{{N}}|{OTHER}[\r\n]*{SPACES}"


@dataclass(frozen=True)
class Split:
    """The split of one kind of tokenizer."""

    expressions: tuple[str, ...]  # in turn
    whole: bool = False  # whether a part that is a token is taken whole, without merges
    composed: bool = False  # whether characters are composed (NFC) first; llama.cpp does not
    bos: bool = False  # whether BOS begins each text, unless the files say otherwise
