"""Grammars that an answer must follow: which tokens may come next. Processes that only check grammars import this
module, so it imports transformers where it is needed."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import Grammar

if TYPE_CHECKING:
    from umbra.text.tokenizer import Tokenizer

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
    """Makes matchers for the tokenizer of a checkpoint whose end-of-sequence ids are `stop_ids`."""

    def __init__(self, tokenizer: "Tokenizer", vocabulary: int, stop_ids: Collection[int]):
        from llguidance.hf import from_tokenizer

        if not stop_ids:
            raise UserError(f"{tokenizer.folder}: names no end-of-sequence token, which an answer with a grammar needs")
        self.tokens: LLTokenizer = from_tokenizer(tokenizer.hf, n_vocab=vocabulary, eos_token=sorted(stop_ids))

    def matcher(self, grammar: Grammar) -> Matcher:
        """Raises UserError if `grammar` is invalid or too complex."""
        return Matcher(LLMatcher(self.tokens, self.checked(grammar), log_level=0))

    def checked(self, grammar: Grammar) -> str:
        """Checks the grammar as the function `checked` does, and returns it in llguidance's form."""
        return checked(grammar, self.tokens)


def checked(grammar: Grammar, tokens: LLTokenizer) -> str:
    """The grammar in llguidance's form. Raises UserError if it is invalid or too complex; some grammars take hours."""
    if len(grammar.text) > LARGEST:
        raise UserError(f"grammar: {len(grammar.text)} characters are more than {LARGEST}")
    make = {
        "json": lambda text: LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}),
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }
    try:
        text = make[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"grammar: {' '.join(str(error).split())[:300]}") from None
    invalid, problems = LLMatcher.validate_grammar_with_warnings(text, tokens)
    if invalid:
        raise UserError(f"grammar: {' '.join(problems[0].split())[:300]}")
    return text
