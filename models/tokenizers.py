"""Opens tokenizers of checkpoints with what the families' records say of texts."""

from pathlib import Path

from umbra.models.registry import conventions
from umbra.text.tokenizer import Tokenizer
from umbra.text.tokenizer_file import has_tokenizer
from umbra.text.tokenizer_record import TokenizerRecord, read_record


def tokenizer_in(folder: Path, vocabulary: int | None = None, template: str = "") -> Tokenizer:
    """Returns the tokenizer in `folder`; `vocabulary` and `template` are as of `Tokenizer`."""
    return Tokenizer(folder, conventions(), vocabulary, template)


def open_tokenizer(folder: Path, needed: bool, vocabulary: int | None = None, template: str = "") -> Tokenizer | None:
    """Returns the same, or None if the checkpoint in `folder` has no tokenizer and none is `needed`."""
    if needed or has_tokenizer(folder):
        return tokenizer_in(folder, vocabulary, template)
    return None


def record_in(folder: Path) -> TokenizerRecord:
    """Returns what there is to know of the tokenizer in `folder`, without making one of it."""
    return read_record(folder, conventions())
