"""The bytes that the tokens of a vocabulary stand for, by the decoder of its tokenizer."""

import json
import re
from collections.abc import Callable
from typing import Any

from umbra.text.tiktoken_file import LETTERS
from umbra.text.tokenizer_file import parts_of

BYTES = {ord(letter): byte for byte, letter in ((b, chr(LETTERS.get(b, b))) for b in range(256))}
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_tokens(backend: Any) -> Callable[[str], bytes]:
    """Returns the function that gives the bytes of a token of `backend`, a tokenizer of the library."""
    parts = [*parts_of(json.loads(backend.decoder.__getstate__()))] if backend.decoder else []
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _of_letters
    space = next((p["pattern"]["String"] for p in parts if p.get("type") == "Replace" and p.get("content") == " "), "")
    return lambda token: _of_text(token, space if "ByteFallback" in kinds else "")


def _of_letters(token: str) -> bytes:
    """Byte-level BPE writes each byte as a letter."""
    letters = [BYTES.get(ord(letter)) for letter in token]
    return bytes(byte for byte in letters if byte is not None) if None not in letters else token.encode()


def _of_text(token: str, space: str) -> bytes:
    """SentencePiece writes a byte that is no character by its number, and a space as another character."""
    if byte := BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return (token.replace(space, " ") if space else token).encode()
