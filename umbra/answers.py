"""Reads what a model generated, in the format that its chat template speaks or the case names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executor.config.case import Case
from executor.run.report import Completion
from text.formats import choose_format
from text.parser import Answer, Parser
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reply(Completion):
    """A completion that was read."""

    answer: Answer


def answer_parser(case: Case, tokenizer: Tokenizer, prompt: list[int], tools: Sequence[Mapping[str, Any]]) -> Parser:
    """The parser for the answer to a prompt, given as token ids."""
    settings = case.model_config
    format = choose_format(settings.output_format, tokenizer.template)
    return Parser(format, tools, tokenizer.opens_reasoning(prompt), settings.reasoning == "split")
