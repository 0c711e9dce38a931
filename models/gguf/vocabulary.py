"""The tokenizer that a GGUF file's metadata stands for: the contents of tokenizer.json and of the files beside it."""

from typing import Any

from umbra.base.errors import UserError, short
from umbra.models.hf_config import HfConfig
from umbra.models.registry import conventions
from umbra.text.formats import CALL, END, RETURN
from umbra.text.splits import Split

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # kinds of tokens
SENTENCE_PIECE = "llama"  # kind of tokenizers whose merges follow from the scores of tokens
SPACED = "gemma4"  # kind of tokenizers that have merges, and otherwise tokens as those
SPACE = "\u2581"  # stands for a space in their tokens
AT = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
LONGEST_PIECE = 256  # characters of a token that is joined from parts
# Tokens that end an answer in any model that has them, beside those of the families' records; END does only where it is
# not a mark between messages.
STOPS = ("<|im_end|>", "<|endoftext|>", RETURN, CALL, "<|eot_id|>", "<|eom_id|>")
SAMPLING = {  # of generation_config.json, with the file's key
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class Vocabulary:
    """The tokens of `meta`, a file's metadata. Raises UserError for what is wrong or of an unknown kind."""

    def __init__(self, meta: HfConfig):
        self.meta, self.conventions = meta, conventions()
        self.kind, splits = meta.value(f"{AT}model"), self.conventions.splits
        if self.kind == SENTENCE_PIECE:
            self.split = Split((), bos=True)
        elif self.kind == SPACED:
            self.split = splits[SPACED]
        else:
            self.split = splits[meta.one_of(f"{AT}pre", allowed=tuple(splits))]
        self.tokens = self._texts("tokens")
        self.kinds = meta.value(f"{AT}token_type", default=[NORMAL] * len(self.tokens))
        if not isinstance(self.kinds, list) or len(self.kinds) != len(self.tokens):
            raise meta.error(f"{AT}token_type", f"must have a number for each of {len(self.tokens)} tokens")
        used = [
            (text, id) for id, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)) if kind != UNUSED
        ]
        self.ids = dict(used)
        if len(self.ids) < len(used):
            repeated = next(text for text, id in used if self.ids[text] != id)
            raise UserError(f"{meta.where}: {AT}tokens: {short(repeated)} stands twice")

    def _texts(self, name: str) -> list[str]:
        texts = self.meta.value(AT + name)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.meta.error(AT + name, "must be a list of texts")
        return texts

    def _token(self, name: str) -> str | None:
        """The text of the token that has the part `name`."""
        key = f"{AT}{name}_token_id"
        if self.meta.value(key) is None:
            return None
        return self.tokens[self.meta.size(key, minimum=0, maximum=len(self.tokens) - 1)]

    def tokenizer(self) -> dict[str, Any]:
        """The contents of tokenizer.json. Every token is in the vocabulary, so that none changes its id."""
        if self.kind == SENTENCE_PIECE:
            return self._with_bytes(self._pairs_by_scores(), self.meta.flag(f"{AT}add_space_prefix", True))
        pairs = self._pairs()
        if self.kind == SPACED:
            return self._with_bytes(pairs, self.meta.flag(f"{AT}add_space_prefix", False))
        return {
            "version": "1.0",
            "added_tokens": self._added(CONTROL, USER_DEFINED),
            "normalizer": {"type": "NFC"} if self.split.composed else None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    *self._splits(),
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            },
            "post_processor": self._around(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "ignore_merges": self.split.whole, "vocab": self.ids, "merges": pairs},
        }

    def _splits(self) -> list[dict[str, Any]]:
        return [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in self.split.expressions
        ]

    def _pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of tokens that are joined, in order."""
        merges = [(merge, merge.find(" ", 1)) for merge in self._texts("merges")]
        if wrong := next((merge for merge, at in merges if at < 0), None):
            raise UserError(f"{self.meta.where}: {AT}merges: {short(wrong)} is not two tokens with a space between")
        pairs = [(merge[:at], merge[at + 1 :]) for merge, at in merges]
        if unknown := next((pair for pair in pairs if not {*pair, "".join(pair)} <= self.ids.keys()), None):
            raise UserError(
                f"{self.meta.where}: {AT}merges: {short(' '.join(unknown))} makes or joins what is no token"
            )
        return pairs

    def _added(self, *kinds: int) -> list[dict[str, Any]]:
        """Returns the tokens of these kinds, which are found in a text before it is split."""
        layout = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": id, "content": text, **layout, "special": self.kinds[id] != USER_DEFINED}
            for text, id in self.ids.items()
            if self.kinds[id] in kinds and text
        ]

    def _pairs_by_scores(self) -> list[tuple[str, str]]:
        """Returns the pairs of a tokenizer that joins the two parts whose token has the highest score."""
        scores = self.meta.value(f"{AT}scores", default=[])
        if len(scores) != len(self.tokens) or not all(isinstance(score, float) for score in scores):
            raise self.meta.error(f"{AT}scores", f"must have a number for each of {len(self.tokens)} tokens")
        pairs = sorted(
            (
                (-scores[id], -at, at - len(text), text[:at], text[at:])
                for text, id in self.ids.items()
                if self.kinds[id] == NORMAL and len(text) <= LONGEST_PIECE
                for at in range(1, len(text))
                if text[:at] in self.ids and text[at:] in self.ids
            ),
            key=lambda pair: pair[:3],
        )
        return [pair[3:] for pair in pairs]

    def _with_bytes(self, pairs: list[tuple[str, str]], before: bool) -> dict[str, Any]:
        """Returns the contents of tokenizer.json of a tokenizer that joins `pairs`, and writes a character that is no
        token in bytes. `before`: a space stands before a text."""
        unknown = next((text for text, id in self.ids.items() if self.kinds[id] == UNKNOWN), None)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        first = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        return {
            "version": "1.0",
            "added_tokens": self._added(UNKNOWN, CONTROL, USER_DEFINED),
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if before else []), spaces],
            },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if (splits := self._splits()) else None,
            "post_processor": self._around(),
            "decoder": {
                "type": "Sequence",
                "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([first] if before else [])],
            },
            "model": {
                "type": "BPE",
                "unk_token": unknown,
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self.ids,
                "merges": pairs,
            },
        }

    def _around(self) -> dict[str, Any] | None:
        """Returns the post-processor that adds the tokens at the beginning and end of each text; None: there are
        none."""
        adds = {
            "bos": self.meta.flag(f"{AT}add_bos_token", self.split.bos),
            "eos": self.meta.flag(f"{AT}add_eos_token", False),
        }
        texts = {name: self._token(name) for name, added in adds.items() if added}
        marks = {name: {"SpecialToken": {"id": text, "type_id": 0}} for name, text in texts.items() if text}
        if not marks:
            return None
        single = [marks.get("bos"), {"Sequence": {"id": "A", "type_id": 0}}, marks.get("eos")]
        return {
            "type": "TemplateProcessing",
            "single": [part for part in single if part],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {
                text: {"id": text, "ids": [self.ids[text]], "tokens": [text]} for text in texts.values() if text
            },
        }

    def settings(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        special = {ours: self._token(theirs) for theirs, ours in names.items()}
        templates = {
            key: text for key, text in self.meta.data.items() if key.startswith(TEMPLATE) and key != f"{TEMPLATE}s"
        }
        if not all(isinstance(text, str) for text in templates.values()):
            raise self.meta.error(TEMPLATE, "must be text")
        settings = {name: text for name, text in special.items() if text} | {"tokenizer_class": "TokenizersBackend"}
        if set(templates) == {TEMPLATE}:
            settings["chat_template"] = templates[TEMPLATE]
        elif templates:
            named = {key.removeprefix(TEMPLATE).lstrip(".") or "default": text for key, text in templates.items()}
            return settings | {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
        return settings

    def generation(self, more_stops: tuple[str, ...]) -> dict[str, Any]:
        """The contents of generation_config.json: sampling, and the ids of the tokens that end an answer."""
        ends = {text for name in ("eos", "eot", "eom") if (text := self._token(name)) is not None}
        marks = {text for text, id in self.ids.items() if self.kinds[id] in (CONTROL, USER_DEFINED)}
        ends |= marks.intersection((*STOPS, *self.conventions.ends, *more_stops))
        if END in marks and not {RETURN, CALL} <= marks:
            ends.add(END)
        sampling = {ours: self.meta.value(f"general.sampling.{theirs}") for ours, theirs in SAMPLING.items()}
        numbers = {
            name: float(f"{v:.6g}") if isinstance(v, float) else v for name, v in sampling.items() if v is not None
        }
        return {"eos_token_id": sorted(self.ids[text] for text in ends if text in self.ids), **numbers}
