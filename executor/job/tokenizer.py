"""Text to token ids and back, with the checkpoint's own tokenizer, chat template and end-of-sequence ids."""

from collections.abc import Iterable
from pathlib import Path

from errors import UserError
from executor.config.case import Case
from models.hf_config import HfConfig, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class Tokenizer:
    def __init__(self, folder: Path):
        from transformers import AutoTokenizer  # a second to import: only where text is used
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            self.hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises whatever the file provokes
            raise UserError(f"{folder}: tokenizer not readable: {' '.join(str(error).split())[:300]}") from None

    def encode(self, prompt: str, chat: bool) -> list[int]:
        """`chat`: as the first message of a conversation."""
        return self.encode_chat([{"role": "user", "content": prompt}]) if chat else list(self.hf(prompt)["input_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation through the checkpoint's chat template, up to where the next answer begins."""
        if not self.hf.chat_template:
            raise UserError("model_config.tokenizer_mode: chat: this checkpoint's tokenizer has no chat template")
        try:
            text = self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the checkpoint's author, run in jinja2's sandbox
            raise UserError(f"the checkpoint's chat template failed: {' '.join(str(error).split())[:300]}") from None
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
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


def open_tokenizer(folder: Path, case: Case) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where random prompts make do without."""
    if case.data_config.prompts or all((folder / name).is_file() for name in TOKENIZER_FILES):
        return Tokenizer(folder)
    return None


def stop_ids(folder: Path, from_config: tuple[int, ...]) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json's, or else config.json's."""
    path = folder / "generation_config.json"
    if path.is_file():
        ids = HfConfig(read_json(path), str(path)).one_or_more("eos_token_id")
        if ids:
            return frozenset(ids)
    return frozenset(from_config)


def encode_prompts(case: Case, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt of the case, none empty and none too long."""
    data, encoded = case.data_config, []
    for i, prompt in enumerate(data.prompts):
        ids = tokenizer.encode(prompt, case.model_config.tokenizer_mode == "chat")
        if not ids:
            raise UserError(f"data_config.prompts: prompt {i} ({prompt!r:.40}) has no tokens")
        if len(ids) > data.input_max_len:
            if data.long_prompts == "error":
                raise UserError(
                    f"data_config.prompts: prompt {i} ({prompt!r:.40}) has {len(ids)} tokens, input_max_len is "
                    f"{data.input_max_len}: raise it, or set long_prompts: truncate"
                )
            ids = ids[-data.input_max_len :]
        encoded.append(ids)
    return encoded
