"""The only thing that passes from the scheduler to a model: one step's tokens and where their keys and values lie."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T new tokens of S sequences, packed one sequence after another. Decode: T = S."""

    token_ids: Tensor  # (T) int64
    positions: Tensor  # (T) int64
    slots: Tensor  # (T) int64: page * page_size + offset of each new token
    block_tables: Tensor  # (S, pages of the longest possible sequence) int64
    query_starts: Tensor  # (S + 1) int64
    kv_lens: Tensor  # (S) int64, the new tokens included
    logit_rows: Tensor | None  # rows of T whose logits are wanted; None: all
    tokens_per_group: tuple[int, ...]  # T of every data-parallel group
