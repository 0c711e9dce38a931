"""The bytes of tokens and records of tokenizers, of a vocabulary as large as published ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.text.checkpoints import id_of, write_tokenizer
from umbra.executor.engine.schedule.grammar import Grammars
from umbra.executor.engine.schedule.request import Grammar
from umbra.models.tokenizers import record_in, tokenizer_in
from umbra.text import tokenizer_record

VOCABULARY = 200_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder with a byte-level tokenizer whose tokens are all of up to three letters."""
    folder = tmp_path_factory.mktemp("large")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*letters, *(a + b for a in letters for b in letters)]
    texts += [letters[i % 256] + letters[i // 256 % 256] + letters[i // 65536] for i in range(VOCABULARY - 3)]
    tokenizer = Tokenizer(BPE({text: id for id, text in enumerate(dict.fromkeys(texts[: VOCABULARY - 3]))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("plain", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def test_bytes_and_special_tokens_are_those_of_grammars(folder: Path) -> None:
    """Without the seconds that llguidance takes to make its tables."""
    tokenizer = tokenizer_in(folder)
    grammars = Grammars.read(folder, VOCABULARY, [id_of(tokenizer, "<|end|>")])
    size = tokenizer.backend.get_vocab_size()
    assert size == VOCABULARY
    ours = [tokenizer.token_bytes(id) for id in range(size)]
    others = [id for id, data in enumerate(ours) if data[0] != 255]  # which marks special tokens for llguidance
    assert len(others) > VOCABULARY * 0.99
    assert all(ours[id] == grammars.tokens.decode_bytes([id]) for id in others)
    assert tokenizer.token_bytes(size) == b""
    special = [id for id in others if grammars.tokens.is_special_token(id)]
    assert sorted(tokenizer.atoms.values()) == special == [VOCABULARY - 3, VOCABULARY - 2]
    mask = grammars.matcher(Grammar("regex", "é!")).allowed()
    assert len(mask) >= VOCABULARY // 8
    assert sum(byte.bit_count() for byte in mask) == 1


def test_a_record_is_read_without_transformers(folder: Path) -> None:
    record = record_in(folder)
    code = (
        "import sys, pathlib\nfrom umbra.text import tokenizer_record\n"
        "from umbra.models.tokenizers import tokenizer_in\n"
        f"tokenizer_record.RECORDS = pathlib.Path({str(tokenizer_record.RECORDS)!r})\n"
        f"print(tokenizer_in(pathlib.Path({str(folder)!r})).encode('ab', chat=False), 'transformers' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    expected = Tokenizer.from_str(record.backend).encode("ab").ids
    assert said == f"{expected} False\n"


def test_a_record_is_made_again_if_its_files_change_or_others_may_write_it(tmp_path: Path) -> None:
    size = write_tokenizer(tmp_path, "qwen3")
    before = {*tokenizer_record.RECORDS.iterdir()}
    assert (record_in(tmp_path).eos_token_id or 0) < size
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "<|im_start|>"}))
    assert record_in(tmp_path).special_tokens["pad_token"] == "<|im_start|>"
    for changed in {*tokenizer_record.RECORDS.iterdir()} - before:
        changed.write_bytes(changed.read_bytes().replace(b"<|im_start|>", b"<|im_trust|>"))
        changed.chmod(0o666)
    assert record_in(tmp_path).special_tokens["pad_token"] == "<|im_start|>"
