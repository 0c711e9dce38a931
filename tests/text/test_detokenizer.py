"""Text from tokens, piece by piece."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.text.checkpoints import write_tokenizer
from text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    return Tokenizer(folder, write_tokenizer(folder, "qwen3"))


def test_pieces_are_whole_characters_and_add_up(letters: Tokenizer) -> None:
    text = "naïve 😀😀\n日本 <think>é"
    detokenizer = letters.detokenizer()
    pieces = [detokenizer.push([id]) for id in letters.encode(text, chat=False)]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    assert detokenizer.rest() == ""


def test_any_bytes_give_what_decoding_them_together_gives(letters: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(256) for _ in range(draw.randrange(60))]
        detokenizer = letters.detokenizer()
        pieces = [detokenizer.push([id]) for id in ids]
        assert "".join(pieces) + detokenizer.rest() == letters.decode(ids)


def test_half_a_character_comes_at_the_end(letters: Tokenizer) -> None:
    detokenizer = letters.detokenizer()
    assert detokenizer.push(letters.encode("a😀", chat=False)[:-1]) == "a"
    assert detokenizer.rest() == "�"


def test_a_space_between_prompt_and_answer_is_kept(tmp_path: Path) -> None:
    """As tokenizers of the SentencePiece kind, whose decoder drops the first token's space."""
    backend = Backend(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "</s>": 3}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    detokenizer = tokenizer.detokenizer([0, 3])
    assert [detokenizer.push([id]) for id in (1, 2, 1)] == [" b", "c", " b"]
    assert tokenizer.detokenizer().push([1, 2, 1]) == "bc b"
