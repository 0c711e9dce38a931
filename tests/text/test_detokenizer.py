"""Text from tokens, piece by piece, up to a stop string."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.text.checkpoints import write_tokenizer
from umbra.models.tokenizers import tokenizer_in
from umbra.text.stops import Stops
from umbra.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    return tokenizer_in(folder, write_tokenizer(folder, "qwen3"))


def test_any_bytes_give_what_decoding_them_together_gives(letters: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(256) for _ in range(draw.randrange(60))]
        detokenizer = letters.detokenizer()
        pieces = [detokenizer.push([id]) for id in ids]
        assert "".join(pieces) + detokenizer.rest() == letters.decode(ids)


def test_a_space_between_prompt_and_answer_is_kept(tmp_path: Path) -> None:
    """As tokenizers of the SentencePiece kind, whose decoder drops the first token's space."""
    backend = Backend(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "</s>": 3}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = tokenizer_in(tmp_path)
    detokenizer = tokenizer.detokenizer([0, 3])
    assert [detokenizer.push([id]) for id in (1, 2, 1)] == [" b", "c", " b"]
    assert tokenizer.detokenizer().push([1, 2, 1]) == "bc b"


TEXT = st.text("ab<", max_size=30)


@given(st.lists(TEXT, max_size=10), st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4))
def test_the_first_complete_stop_ends_the_text(pieces: list[str], wanted: list[str]) -> None:
    text, stops = "".join(pieces), Stops(wanted)
    ends = [(at + len(stop), at) for stop in wanted if (at := text.find(stop)) >= 0]
    said = ""
    for piece in pieces:
        before = stops.stopped
        said += stops.push(piece)
        assert not (before and stops.push(piece))
    assert stops.stopped == bool(ends)
    said += stops.finish()
    assert said == (text[: min(ends)[1]] if ends else text)


def test_only_the_beginning_of_a_stop_is_held_back() -> None:
    stops = Stops(["</think>", "END"])
    assert [stops.push(piece) for piece in ("a <b", " E", "N", "D")] == ["a <b", " ", "", ""]
    assert stops.stopped
    assert stops.push("more") == stops.finish() == ""
