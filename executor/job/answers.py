"""Reads what a model generated, in the format that its chat template speaks or the case names."""

from collections.abc import Mapping, Sequence
from typing import Any

from executor.checkpoint.tokenizer import Tokenizer
from executor.config.case import Case
from executor.job.report import Completion
from executor.text.formats import choose_format
from executor.text.parser import Answer, Parser


def answer_parser(
    case: Case, tokenizer: Tokenizer, prompt: list[int], tools: Sequence[Mapping[str, Any]] = ()
) -> Parser:
    """The parser for the answer to a prompt, given as token ids."""
    settings = case.model_config
    format = choose_format(settings.output_format, tokenizer.template)
    return Parser(format, tools, tokenizer.opens_reasoning(prompt), settings.reasoning == "split")


def completion(
    case: Case,
    tokenizer: Tokenizer | None,
    shown: str,
    prompt: list[int],
    tokens: list[int],
    finish_reason: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Completion:
    """What was generated for a prompt; `shown` is its text. Without a tokenizer there are only the tokens."""
    if tokenizer is None:
        return Completion(shown, "", tokens, finish_reason, Answer())
    text = tokenizer.decode(tokens)
    answer = answer_parser(case, tokenizer, prompt, tools).whole(text)
    return Completion(shown, text, tokens, finish_reason, answer)
