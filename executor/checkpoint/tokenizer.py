"""Text to token ids and back, with the tokenizer, chat template and end-of-sequence ids of the checkpoint."""

from collections.abc import Iterable
from pathlib import Path

from errors import UserError
from executor.checkpoint.names import TOKENIZER_FILES
from models.hf_config import HfConfig, read_json


class Tokenizer:
    def __init__(self, folder: Path, vocabulary: int | None = None):
        """The tokenizer in `folder`. Ids from `vocabulary` on are refused: the model has no embedding for them."""
        self.folder, self.vocabulary = folder, vocabulary
        from transformers import AutoTokenizer  # a second to import: only where text is used
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            self.hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises whatever the file provokes
            raise UserError(f"{folder}: tokenizer not readable: {' '.join(str(error).split())[:300]}") from None

    def encode(self, prompt: str, chat: bool) -> list[int]:
        """The token ids of `prompt`; with `chat`, of a conversation in which it is the user's first turn."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"the prompt {prompt!r:.40} has half of a surrogate pair: not text") from None
        if not chat:
            return self._checked(self.hf(prompt)["input_ids"])
        return self.encode_chat([{"role": "user", "content": prompt}])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation through the checkpoint's chat template, up to where the next answer begins."""
        if not self.hf.chat_template:
            raise UserError("model_config.tokenizer_mode: chat: this checkpoint's tokenizer has no chat template")
        try:
            text = self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the checkpoint's author, run in jinja2's sandbox
            raise UserError(f"the checkpoint's chat template failed: {' '.join(str(error).split())[:300]}") from None
        return self._checked(self.hf(text, add_special_tokens=False)["input_ids"])

    def _checked(self, ids: list[int]) -> list[int]:
        if self.vocabulary is not None and ids and max(ids) >= self.vocabulary:
            raise UserError(
                f"{self.folder}: its tokenizer gives {max(ids)}, outside vocab_size {self.vocabulary}: tokenizer and "
                "config.json are not of one checkpoint"
            )
        return list(ids)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, without special tokens."""
        return str(self.hf.decode(ids, skip_special_tokens=True))

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)


class Detokenizer:
    """Text piece by piece as tokens come: a piece is given once no later token can change it."""

    def __init__(self, tokenizer: Tokenizer):
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self.tokens: list[int] = []
        self.given = ""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain after `tokens`, beyond what was given before; often empty."""
        piece = ""
        for token in tokens:
            self.tokens.append(token)
            piece += self.stream.step(self.tokenizer.hf.backend_tokenizer, token) or ""
        self.given += piece
        return piece

    def rest(self) -> str:
        """What is left at the end, such as half of a character."""
        return self.tokenizer.decode(self.tokens).removeprefix(self.given)


def open_tokenizer(folder: Path, vocabulary: int, needed: bool) -> Tokenizer | None:
    """The tokenizer of the checkpoint in `folder`; None where it has no tokenizer and none is `needed`."""
    if needed or all((folder / name).is_file() for name in TOKENIZER_FILES):
        return Tokenizer(folder, vocabulary)
    return None


def stop_ids(folder: Path, from_config: tuple[int, ...]) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json, or else `from_config`, those of config.json."""
    path = folder / "generation_config.json"
    if path.is_file():
        ids = HfConfig(read_json(path), str(path)).one_or_more("eos_token_id")
        if ids:
            return frozenset(ids)
    return frozenset(from_config)
