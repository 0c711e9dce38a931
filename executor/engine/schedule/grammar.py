"""Grammars that an answer must follow: which tokens may come next. Processes that only check grammars import this
module, so it imports neither torch nor transformers."""

from collections.abc import Collection, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import Grammar
from umbra.models.tokenizers import record_in

LARGEST = 1 << 16  # characters of a grammar


class Matcher:
    """One answer's way through its grammar."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher

    def allowed(self) -> bytes:
        """The tokens that may come next, from the lowest bit of each byte on."""
        return self.matcher.compute_bitmask()

    def allowed_after(self, draft: Sequence[int]) -> list[bytes]:
        """`allowed()` now and after each token of a draft, as far as the draft follows the grammar."""
        masks = [self.allowed()]
        for token in draft[: self.followed(draft)]:
            self.matcher.consume_token(token)
            masks.append(self.allowed())
        self.matcher.rollback(len(masks) - 1)
        return masks

    def followed(self, draft: Sequence[int]) -> int:
        """Returns the number of a draft's first tokens that follow the grammar."""
        return self.matcher.validate_tokens(list(draft))

    def accept(self, token: int) -> bool:
        """Moves on by `token`. False: the grammar cannot be followed any further."""
        return not self.matcher.is_error() and self.matcher.consume_token(token)


class Grammars:
    """Makes matchers for the vocabulary of `tokens`."""

    def __init__(self, tokens: LLTokenizer):
        self.tokens = tokens

    @classmethod
    def read(cls, folder: Path, vocabulary: int, stop_ids: Collection[int]) -> "Grammars":
        """The grammars of the checkpoint in `folder`, whose end-of-sequence ids are `stop_ids`. It takes seconds for a
        large vocabulary, in which no other thread of this process runs Python. Raises UserError if it has none."""
        if not stop_ids:
            raise UserError(f"{folder}: names no end-of-sequence token, which an answer with a grammar needs")
        record = record_in(folder)
        try:
            return cls(LLTokenizer(record.backend, n_vocab=vocabulary, eos_token=sorted(stop_ids)))
        except ValueError as error:
            raise UserError(f"{folder}: grammars cannot use its tokenizer: {str(error)[:200]}") from None

    def matcher(self, grammar: Grammar) -> Matcher:
        """Compiles `grammar` up to its first token; other threads go on meanwhile. Raises UserError if it is invalid or
        too complex."""
        matcher = LLMatcher(self.tokens, compilable(grammar), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UserError(f"grammar: {' '.join(matcher.get_error().split())[:300]}")
        return Matcher(matcher)


def compilable(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises UserError if it is too long, or no JSON."""
    if len(grammar.text) > LARGEST:
        raise UserError(f"grammar: {len(grammar.text)} characters are more than {LARGEST}")
    make = {
        "json": lambda text: LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}),
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }
    try:
        return make[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"grammar: {' '.join(str(error).split())[:300]}") from None
