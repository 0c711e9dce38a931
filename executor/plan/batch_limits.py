"""The limits of what the scheduler may run at once: numbers from a case, from which the engine sizes the KV cache as
well."""

import bisect
from dataclasses import dataclass

from umbra.executor.config.case import Case
from umbra.executor.plan.layer_sets import layer_sets
from umbra.models.config import Expansion, ModelConfig


@dataclass(frozen=True)
class Limits:
    batch_size: int  # most sequences that run together, in all data-parallel groups
    max_sequence_length: int  # most prompt and generated tokens of a sequence
    page_size: int
    groups: int = 1  # data-parallel groups
    prefill_tokens: int | None = None  # most prompt tokens of each group in a step; None: no limit
    mixed_tokens: int | None = None  # the same for a step in which other sequences decode
    # Most tokens beyond those it has that a sequence is promised when it is admitted. With None it is promised pages
    # for all tokens that it may ever have, and nothing is ever preempted.
    reserve: int | None = None
    prefixes: bool = False  # whether the pages of sequences that have ended are kept for later prompts
    prefix_floor: int = 0  # kept pages that are dropped only after all experts
    draft_tokens: int = 0  # most drafted tokens of a sequence in a step
    windows: tuple[int | None, ...] = (None,)  # of each set of layers (layer_sets.py): tokens that a token sees
    set_pages: int = 0  # pages that a set of recurrent states takes; 0: the model has none
    checkpoints: int = 0  # sets for which there is room beyond those of sequences
    expansion: Expansion | None = None  # of attention over latents

    @property
    def per_group(self) -> int:
        """Most sequences of a data-parallel group that run together."""
        return self.batch_size // self.groups

    @property
    def table_width(self) -> int:
        """Number of pages of the longest sequence."""
        return -(-self.max_sequence_length // self.page_size)

    @property
    def pages(self) -> int:
        """Number of pages with which a group can never run out of them."""
        return self.per_group * self.pages_of(self.max_sequence_length) + self.checkpoints * self.set_pages

    @property
    def state_pages(self) -> int:
        """Most pages that a sequence's recurrent states take: one set, and where prefixes are kept another one, with
        the states after its last full page."""
        return (1 + self.prefixes) * self.set_pages

    def pages_of(self, tokens: int) -> int:
        """Most pages, of all sets of layers and of its states, that a sequence holds while it has up to `tokens`
        tokens."""
        every = -(-tokens // self.page_size)
        new = max(self.prefill_tokens or tokens, 1 + self.draft_tokens)  # tokens of a step
        cached = (every if w is None else min(every, -(-(w + new - 2) // self.page_size) + 1) for w in self.windows)
        return sum(cached) + self.state_pages

    def longest_in(self, pages: int) -> int:
        """Tokens of the longest sequence that fits into so many pages."""
        return bisect.bisect_right(range(self.max_sequence_length + 1), pages, key=self.pages_of) - 1


def limits_of(case: Case, config: ModelConfig, serving: bool = False, set_pages: int = 0) -> Limits:
    """The limits of a run of the case's prompts or, with `serving`, of a server of the case. `config` is that of the
    model; `set_pages` is the price of its recurrent states."""
    data, serve = case.data_config, case.serve_config
    sizes = [size for size in (data.chunked_prefill_size, data.mixed_prefill_size) if size]
    return Limits(
        batch_size=data.batch_size,
        max_sequence_length=case.max_sequence_length,
        page_size=case.cache_config.page_size,
        groups=case.attn_dp_size,
        prefill_tokens=data.chunked_prefill_size,
        mixed_tokens=min(sizes, default=None),
        reserve=serve.reserve if serving else None,
        prefixes=serving and serve.prefix_cache,
        prefix_floor=serve.prefix_floor // case.cache_config.page_size if serving else 0,
        draft_tokens=case.draft_config.most,
        windows=tuple(layers.window for layers in layer_sets(config.windows)),
        set_pages=set_pages,
        checkpoints=case.cache_config.state_checkpoints if serve.prefix_cache else 0,
        expansion=config.expansion,
    )
