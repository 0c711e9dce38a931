"""Guesses of the next tokens by a model's own layer for it (models/layers/mtp.py), after each step.

The layer takes every token that a step has computed, with the token after it, and caches what it keeps of it in pages
of the sequence, as the other layers do. From the last token of each sequence it guesses the one after the next;
further guesses go on from its own hidden state and its guess. What it caches of guessed tokens is written again once
the tokens are known; nothing but guesses reads it.
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as ListOf

import torch

from executor.engine.batching import pack_rows
from executor.engine.engine import Engine
from executor.engine.sequence import Sequence
from models.batch import Batch
from ops.interface import tensor_of

Computed = tuple[Sequence, int, int]  # a sequence, and the first and the last position, plus one, that a step computed


class MtpDrafter:
    def __init__(self, engine: Engine):
        self.engine = engine
        model, platform = engine.model, engine.platform
        self.run = lambda batch: model.guess(batch.to(platform.device))
        if engine.case.exe_mode != "eager":
            self.captured = platform.compile(model.guess, engine.config)

    def guess(
        self, batch: Batch, computed: ListOf[Computed], groups: ListOf[ListOf[Sequence]], room: Mapping[int, int],
        decode: bool,
    ) -> list[list[int]]:  # fmt: skip
        """`batch` is that of the step before, which computed the tokens `computed` of this rank's group. `groups` are
        the sequences of each group that now have one token more, room[id] is the number of tokens to guess of each.
        -> as many guesses for each sequence of all groups as there is room for the most"""
        run = self.captured if decode and self.engine.case.exe_mode != "eager" else self.run
        dp, depth = self.engine.parallel.attn_dp, max(room.values(), default=0)
        mine, counts = groups[dp.rank], tuple(map(len, groups)) if depth else (0,) * len(groups)
        ids, found = run(self._first(batch, computed, mine if depth else [], counts))
        guesses = [ids.clone()]
        for number in range(1, depth):
            rows = [(s, len(s.ids) - 2 + number) if number < room[s.id] else None for s in mine]
            further = self._pack(rows, counts)
            ids, found = run(dataclasses.replace(further, token_ids=ids, hidden=found))
            guesses.append(ids.clone())
        if not depth:
            return [[] for of in groups for _ in of]
        tokens: list[list[int]] = dp.gather_rows(torch.stack(guesses, 1), counts).tolist()
        return tokens

    def _first(
        self, batch: Batch, computed: ListOf[Computed], wanted: ListOf[Sequence], counts: tuple[int, ...]
    ) -> Batch:
        """The tokens after those of `batch`, of which the last one of each sequence `wanted` is to give a guess."""
        next_ids, last = torch.zeros(len(batch.token_ids), dtype=torch.int64), {}
        row = 0
        for sequence, begin, end in computed:
            known = sequence.ids[begin + 1 : end + 1]
            if known:
                next_ids[row : row + len(known)] = tensor_of(known)
            last[sequence.id] = row + max(len(sequence.ids) - 2 - begin, 0)
            row += end - begin
        return dataclasses.replace(
            batch, token_ids=next_ids, hidden=self.engine.hidden, recurrent=None,
            logit_rows=torch.tensor([last[s.id] for s in wanted], dtype=torch.int64),
            wanted_per_group=None if batch.sequence_parallel else counts,
        )  # fmt: skip

    def _pack(self, rows: ListOf[tuple[Sequence, int] | None], counts: tuple[int, ...]) -> Batch:
        engine = self.engine
        return pack_rows(engine.platform.ops, rows, engine.pages, counts, engine.table_width, engine.layer_sets)
