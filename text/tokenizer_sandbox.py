"""Encodes texts where a tokenizer of an unusual kind can be ended.

Tokenizers are programs of a checkpoint's author too: a regular expression, or a vocabulary of long tokens, may take
minutes for a text of some thousand characters. Byte-pair encoding with the expressions of published models takes time
in proportion to the text; such tokenizers run in the process that uses them.

This module, run as a program, is the process that has the tokenizer; it forks another for each text.
"""

import contextlib
import json
import sys
from typing import Any

import msgspec

from umbra.text.sandbox import Sandbox, read, tried, write
from umbra.text.tokenizer_file import patterns

BASE_SECONDS = 2.0  # CPU time allowed for any text
CHARACTERS_PER_SECOND = 250_000  # one more second for each
BASE_BYTES = 1 << 29  # memory allowed for any text
BYTES_PER_CHARACTER = 256
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD, OTHER, SPACES = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Expressions of published models, whose matches take a number of steps in proportion to their length.
QWEN = rf"{ENGLISH}|{WORD}\p{{L}}+|\p{{N}}|{OTHER}[\r\n]*{SPACES}"
GPT_4 = rf"{ENGLISH}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}|{OTHER}[\r\n]*{SPACES}"
GPT_4O = rf"{WORD}{UPPER}*{LOWER}+{ENGLISH}?|{WORD}{UPPER}+{LOWER}*{ENGLISH}?|\p{{N}}{{1,3}}|{OTHER}[\r\n/]*{SPACES}"
QWEN_3_5 = rf"{ENGLISH}|{WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{SPACES}"
DEEPSEEK = (  # in turn
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"{SPACES}",
)
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴ"
    "ᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻"
    "𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (  # in turn; the original's fourth may begin within spaces, which does not change what it finds
    r"[\r\n]",
    rf"\s?[{CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"(?<!\s)\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}",
)
NO_HAN = tuple(rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI = (
    rf"[\p{{Han}}]+|{WORD}{NO_HAN[0]}*{NO_HAN[1]}+{ENGLISH}?|{WORD}{NO_HAN[0]}+{NO_HAN[1]}*{ENGLISH}?"
    rf"|\p{{N}}{{1,3}}|{OTHER}[\r\n]*{SPACES}"
)
LINEAR = {QWEN, GPT_4, GPT_4O, QWEN_3_5, KIMI, *DEEPSEEK, *DEEPSEEK_LLM}


def is_linear(backend: Any) -> bool:
    """Returns whether `backend`, a tokenizer of the library, encodes a text in time proportional to its length."""
    made = [part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    used = {pattern for part in made for pattern in patterns(json.loads(part.__getstate__()))}
    return type(backend.model).__name__ == "BPE" and used <= LINEAR


class Encoder:
    """Encodes with `backend` in another process, one text at a time."""

    def __init__(self, backend: Any):
        self._sandbox = Sandbox("umbra.text.tokenizer_sandbox", backend.to_str().encode())

    def ids(self, text: str, special: bool) -> list[int]:
        """Raises ValueError with the reason if the tokenizer fails, or takes too much time or memory."""
        answer = self._sandbox.answer(msgspec.msgpack.encode((text, special)))
        found: list[int] | str = msgspec.msgpack.decode(answer, type=list[int] | str)
        if isinstance(found, str):
            raise ValueError(found)
        return found


def main() -> None:
    """Answers each text on standard input with its ids, or with why there are none."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(read(sys.stdin.buffer).decode())
    backend.no_padding()
    backend.no_truncation()
    with contextlib.suppress(EOFError):
        while True:
            text, special = msgspec.msgpack.decode(read(sys.stdin.buffer))
            write(sys.stdout.buffer, _tried(backend, text, special))


def _tried(backend: Any, text: str, special: bool) -> bytes:
    seconds = BASE_SECONDS + len(text) / CHARACTERS_PER_SECOND
    memory = BASE_BYTES + BYTES_PER_CHARACTER * len(text)
    answer = tried(lambda: _encoded(backend, text, special), seconds, memory)
    more = f"it takes more than {seconds:.3g} s or {memory >> 20} MB for {len(text)} characters"
    return msgspec.msgpack.encode(more) if answer is None else answer


def _encoded(backend: Any, text: str, special: bool) -> bytes:
    try:
        return msgspec.msgpack.encode(backend.encode(text, add_special_tokens=special).ids)
    except BaseException as error:  # what Rust calls a panic is no Exception
        return msgspec.msgpack.encode(str(error)[:1000])


if __name__ == "__main__":
    main()
