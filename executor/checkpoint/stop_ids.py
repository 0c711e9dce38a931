"""Finds the ids that end a sequence in whichever of a checkpoint's files names them."""

from pathlib import Path

from umbra.base.files import read_json
from umbra.models.hf_config import HfConfig
from umbra.models.registry import conventions
from umbra.models.tokenizers import open_tokenizer
from umbra.text.tokenizer_file import ends_of_format


def stop_ids(folder: Path, from_config: tuple[int, ...]) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json; or else `from_config`, those of config.json, which a family
    leaves empty if its checkpoints have wrong ones there; or else the tokenizer's, if there is a tokenizer. With those
    of its tokens that end an answer in any case."""
    return _named(folder, from_config) | ends_of_format(folder, conventions())


def _named(folder: Path, from_config: tuple[int, ...]) -> frozenset[int]:
    path = folder / "generation_config.json"
    if path.is_file():
        ids = HfConfig(read_json(path), str(path)).one_or_more("eos_token_id")
        if ids:
            return frozenset(ids)
    if from_config:
        return frozenset(from_config)
    tokenizer = open_tokenizer(folder, needed=False)
    eos = tokenizer.record.eos_token_id if tokenizer else None
    return frozenset() if eos is None else frozenset([eos])
