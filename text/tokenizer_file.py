"""Checks a tokenizer's files before the library reads them, for what would take endless time or memory or end the
process.

The library's programs are bounded in time, but they write as much text as a file asks for.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from umbra.base.errors import UserError, short
from umbra.base.files import check_pointer, read_json
from umbra.text.conventions import Conventions

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TIKTOKEN_FILE = "tiktoken.model"
SENTENCE_FILE = "tokenizer.model"  # SentencePiece's
SETTINGS_ADD_BOS = ("LlamaTokenizer", "LlamaTokenizerFast")
LARGEST = 32 << 20  # bytes of tokenizer.json
LARGEST_BESIDE = 1 << 20  # bytes of each of the other files
BESIDE = re.compile(r"(tokenizer_config|special_tokens_map|added_tokens|chat_template)\.(json|jinja)")
MOST_GROWTH = 32  # times as long as a text may get on its way to ids, or back
MOST_PARTS = 64  # of a component, each of which passes over the text
MOST_ADDED = 64  # characters or ids that are added to each text
LONGEST_AFFIX = 64  # characters of what marks the parts of words
INNER = ("normalizers", "pretokenizers", "processors", "decoders")  # the parts of a Sequence
AFFIXES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")


class File(msgspec.Struct):
    """The parts that are checked; the vocabulary is passed over."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    model: "Model | None" = None
    added_tokens: "list[Added]" = []


class Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class Model(msgspec.Struct):
    unk_token: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None


def check_tokenizer(folder: Path) -> None:
    """Raises UserError for files that the library should not read. Those that it will refuse may pass."""
    for path in sorted(folder.glob("*")):
        if BESIDE.fullmatch(path.name) and path.stat().st_size > LARGEST_BESIDE:
            raise UserError(f"{path}: tokenizer not readable: larger than {LARGEST_BESIDE >> 20} MB")
    if (folder / TOKENIZER_FILES[0]).is_file():
        _checked(folder / TOKENIZER_FILES[0])
    elif not tiktoken_only(folder) and not (folder / "vocab.json").is_file():
        alone = f" ({SENTENCE_FILE} alone is not read)" if (folder / SENTENCE_FILE).is_file() else ""
        raise UserError(
            f"{folder}: has no {TOKENIZER_FILES[0]}{alone}: copy it "
            "from the checkpoint that this one was made of, or have transformers write it: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )


def has_tokenizer(folder: Path) -> bool:
    """Returns whether `folder` has the files of a tokenizer."""
    return tiktoken_only(folder) or all((folder / name).is_file() for name in TOKENIZER_FILES)


def tiktoken_only(folder: Path) -> bool:
    """Returns whether the tokenizer in `folder` is one that only text/tiktoken_file.py reads."""
    return (folder / TIKTOKEN_FILE).is_file() and not (folder / TOKENIZER_FILES[0]).is_file()


def adds_bos(folder: Path) -> bool:
    """Returns whether the tokenizer in `folder` is of a kind that adds BOS by its settings, and these ask for it."""
    path = folder / TOKENIZER_FILES[1]
    settings = read_json(path) if path.is_file() else {}
    return settings.get("add_bos_token") is True and settings.get("tokenizer_class") in SETTINGS_ADD_BOS


def has_chat_template(folder: Path) -> bool:
    """Returns whether the tokenizer's files in `folder` have a chat template."""
    if any((folder / name).is_file() for name in TEMPLATE_FILES):
        return True
    settings = folder / TOKENIZER_FILES[1]
    return settings.is_file() and bool(read_json(settings).get("chat_template"))


def ends_of_format(folder: Path, conventions: Conventions) -> frozenset[int]:
    """Returns the ids of tokens that end an answer in any case, of the format whose marks are special tokens here."""
    path = folder / TOKENIZER_FILES[0]
    if not path.is_file():
        return frozenset()
    ids = {token.content: token.id for token in _checked(path).added_tokens if token.special}
    format = conventions.format_of_tokens(ids)
    return frozenset(ids[name] for name in (format.ends if format else ()) if name in ids)


def read_template(file: str) -> str:
    """The chat template in a file of the user's."""
    path = Path(file).expanduser()
    try:
        with open(path, "rb") as opened:
            text = opened.read(LARGEST_BESIDE + 1)
        if len(text) > LARGEST_BESIDE:
            raise UserError(f"model_config.chat_template: {path} is larger than {LARGEST_BESIDE >> 20} MB")
        return text.decode()
    except OSError as error:
        raise UserError(f"model_config.chat_template: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"model_config.chat_template: {path} is no UTF-8 text: give a Jinja template") from None


def no_template(folder: Path) -> UserError:
    return UserError(
        f"{folder}: has no chat template, which conversations need: --chat-template FILE gives one "
        "(model_config.chat_template); texts are completed without"
    )


def _checked(path: Path) -> File:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ValueError(f"larger than {LARGEST >> 20} MB")
        written = path.read_bytes()
        check_pointer(path, written)
        file = msgspec.json.decode(written, type=File)
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            _check_growth(name, getattr(file, name))
        added = sum(len(ids) for part in parts_of(file.post_processor) for ids in _added(part))
        if added > MOST_ADDED:
            raise ValueError(f"post_processor: adds {added} ids to each text, more than {MOST_ADDED}")
        for name in AFFIXES:
            if len(str(getattr(file.model, name, None))) > LONGEST_AFFIX:
                raise ValueError(f"model.{name}: longer than {LONGEST_AFFIX} characters")
        return file
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: tokenizer not readable: {error}") from None


def parts_of(component: Any) -> Iterator[dict[str, Any]]:
    """The parts of a component, which is one or a Sequence of them."""
    if not isinstance(component, dict):
        return
    yield component
    for name in INNER:
        parts = component.get(name)
        for part in parts if isinstance(parts, list) else ():
            yield from parts_of(part)


def patterns(component: Any) -> list[str]:
    """The regular expressions in a component."""
    expressions = [part.get("pattern") for part in parts_of(component)]
    return [str(pattern["Regex"]) for pattern in expressions if isinstance(pattern, dict) and "Regex" in pattern]


def _check_growth(name: str, component: Any) -> None:
    growth, added = 1, 0
    parts = list(parts_of(component))
    if len(parts) > MOST_PARTS:
        raise ValueError(f"{name}: has {len(parts)} parts, more than {MOST_PARTS}")
    if name == "decoder" and patterns(component):
        raise ValueError("decoder: a regular expression is not supported: it may take endless time")
    for part in parts:
        if part.get("type") == "Precompiled":
            raise ValueError(f"{name}: Precompiled is not supported: a wrong table would end this process")
        content, pattern = str(part.get("content", "")), part.get("pattern")
        if part.get("type") == "Replace" and isinstance(pattern, dict):
            fixed = str(pattern.get("String", ""))  # a regular expression may match nothing, and so between letters
            growth *= max(1, -(-len(content) // len(fixed)) if fixed else 1 + len(content))
        added += len(str(part.get("prepend", "")))
        if growth > MOST_GROWTH or added > MOST_ADDED:
            raise ValueError(f"{name}: {short(part)} would make texts more than {MOST_GROWTH} times as long")


def _added(part: dict[str, Any]) -> Iterator[Any]:
    """The ids of each special token that the part adds."""
    single, known = part.get("single"), part.get("special_tokens")
    for piece in single if isinstance(single, list) else ():
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        id = special.get("id") if isinstance(special, dict) else None
        token = known.get(id) if isinstance(known, dict) and isinstance(id, str) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        yield ids if isinstance(ids, list) else ()
