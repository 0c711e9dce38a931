"""One prompt on its way to a completion."""

from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Sequence:
    index: int  # place among the prompts
    prompt: str
    ids: list[int]  # prompt and generated tokens
    prompt_len: int
    max_new_tokens: int
    generator: torch.Generator
    group: int = 0  # data-parallel group that runs it
    cached: int = 0  # how many of `ids` have their keys and values in the cache
    pages: list[int] = field(default_factory=list)
    finish_reason: str = ""  # "stop", "length", or empty while it runs

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_len :]

    @property
    def longest(self) -> int:
        """Tokens that it may become."""
        return self.prompt_len + self.max_new_tokens

    most: int = 0  # tokens the next step may take, 0: all; a long prompt is prefilled in several steps

    @property
    def new_tokens(self) -> int:
        """Tokens of the next step: the prompt or a chunk of it at first, then one at a time."""
        waiting = len(self.ids) - self.cached
        return min(self.most, waiting) if self.most else waiting

    @property
    def end(self) -> int:
        """How many of `ids` the cache holds after the next step."""
        return self.cached + self.new_tokens
