"""Tokenizers that ship as tiktoken.model, the ranks of byte strings, without a tokenizer.json.

The expression that splits a text is in a Python file beside it, which Umbra does not execute; families' records have
the published ones. tiktoken joins the two neighbours whose bytes together have the lowest rank. So does a BPE of the
tokenizers library with each way to cut a token in two as a merge, in the order of ranks: of several ways only one can
come up, since what has been joined within a stretch of text depends on that stretch alone.
"""

import base64
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from umbra.base.errors import UserError, short
from umbra.base.files import check_pointer, read_json, write_json
from umbra.text.tokenizer_file import BESIDE, TIKTOKEN_FILE, TOKENIZER_FILES, tiktoken_only

LARGEST = 4 << 20  # bytes of the file; published ones have up to 2.8 million
LONGEST = 256  # bytes of a token
MOST_MERGES = 1 << 20
MOST_ADDED = 1024  # ids behind those of the file
LIBRARY_CLASS = "PreTrainedTokenizerFast"
SHOWN = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that stand for themselves; for others, letters
LETTERS = {byte: 256 + i for i, byte in enumerate(sorted({*range(256)} - SHOWN))}


class TiktokenAdded(msgspec.Struct):
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@contextlib.contextmanager
def converted(folder: Path, classes: Mapping[str, str]) -> Iterator[Path]:
    """Yields a folder with the tokenizer in `folder` as transformers reads it: that one, or one made for the time being
    if there are only ranks. `classes` has the expressions that split a text by the tokenizer's class. Raises UserError
    for files that are wrong, or of another kind."""
    if not tiktoken_only(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        for path in folder.iterdir():
            if BESIDE.fullmatch(path.name):
                shutil.copy(path, temporary)
        settings = Path(temporary, TOKENIZER_FILES[1])
        write_json(settings, _made(folder, Path(temporary, TOKENIZER_FILES[0]), classes))
        yield Path(temporary)


def _made(folder: Path, file: Path, classes: Mapping[str, str]) -> dict[str, Any]:
    """Writes the tokenizer in `folder` as `file`, and returns the settings beside it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    path = folder / TOKENIZER_FILES[1]
    try:
        settings = read_json(path)
        kind = str(settings.get("tokenizer_class"))
        if kind not in classes:
            raise ValueError(
                f"tokenizer_class {short(kind)}: how it splits texts is not known, only of {', '.join(classes)}: write "
                f"a {TOKENIZER_FILES[0]} with the checkpoint's own program"
            )
        given = msgspec.convert(settings.get("added_tokens_decoder"), dict[int, TiktokenAdded], strict=False)
        path = folder / TIKTOKEN_FILE
        vocabulary = _ranks(path)
        merges = _merges(vocabulary)
        path = folder / TOKENIZER_FILES[1]
        added = _added(given, vocabulary)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: tokenizer not readable: {error}") from None
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(classes[kind]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token)) for token in added])
    tokenizer.save(str(file), pretty=False)
    return {key: value for key, value in settings.items() if key != "auto_map"} | {"tokenizer_class": LIBRARY_CLASS}


def _ranks(path: Path) -> dict[str, int]:
    """The tokens of the file, in the letters that stand for bytes, with their ids."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"larger than {LARGEST >> 20} MB")
    written = path.read_bytes()
    check_pointer(path, written)
    ranks: dict[str, int] = {}
    for number, line in enumerate(written.split(b"\n"), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        text = base64.b64decode(token, validate=True).decode("latin-1").translate(LETTERS)
        if not 0 < len(text) <= LONGEST or text in ranks or rank.strip() != b"%d" % len(ranks):
            raise ValueError(f"line {number} must have 1 to {LONGEST} new bytes in base64 and their rank, {len(ranks)}")
        ranks[text] = len(ranks)
    if missing := [byte for byte in range(256) if chr(byte).translate(LETTERS) not in ranks]:
        raise ValueError(f"has no token of the byte {missing[0]}")
    return ranks


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for token in ranks:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in ranks and right in ranks]
        if len(merges) > MOST_MERGES:
            raise ValueError(f"its tokens can be made of others in more than {MOST_MERGES} ways")
    return merges


def _added(given: dict[int, TiktokenAdded], vocabulary: dict[str, int]) -> list[TiktokenAdded]:
    """The tokens behind those of `vocabulary`, which gets their ids; those that have no name get one."""
    first = len(vocabulary)
    wrong = next((id for id in given if not first <= id < first + MOST_ADDED), None)
    if wrong is not None:
        raise ValueError(f"added_tokens_decoder: {wrong} must be from {first} to {first + MOST_ADDED - 1}")
    tokens = []
    for id in range(first, max(given, default=-1) + 1):
        token = given.get(id) or TiktokenAdded(f"<|reserved_token_{id}|>", special=True)
        if not token.content or vocabulary.setdefault(token.content, id) != id:
            raise ValueError(f"added_tokens_decoder: {id}: {short(token.content)} is empty or stands twice")
        tokens.append(token)
    return tokens
