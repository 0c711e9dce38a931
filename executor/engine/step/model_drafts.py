"""Guesses of the next tokens by a model's own layer for it (models/layers/mtp.py), or by an EAGLE3 head made for the
model (models/layers/eagle3.py), after each step.

The layer takes every token that a step has computed, with the token after it, and caches what it keeps of it in pages
of the sequence, as the other layers do. From the last token of each sequence it guesses the one after the next;
further guesses go on from its own hidden state and its guess. What it caches of guessed tokens is written again once
the tokens are known; nothing but guesses reads it. Steps after which nothing is guessed, since that does not pay, leave
the layer out; for sequences of which it lacks tokens, nothing is guessed any more. Guesses for prompts that go on from
pages of such steps may be worse.
"""

import dataclasses
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as ListOf

import torch

from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.platform.base import ModelStep
from umbra.models.batch import Batch
from umbra.ops.interface import tensor_of

# A sequence, and the first position and the last one, plus one, that a step computed.
Computed = tuple[Sequence, int, int]


class ModelDrafter:
    def __init__(self, engine: Engine):
        self.engine = engine
        model, platform = engine.model, engine.platform
        self.run: ModelStep = lambda batch: model.guess(batch.to(platform.device))
        eager, most = engine.case.exe_mode == "eager", engine.case.draft_config.most
        self.captured = self.run if eager else platform.compile(model.guess, engine.config, most)

    def guess(
        self,
        batch: Batch,
        computed: ListOf[ListOf[Computed]],
        asking: ListOf[ListOf[Sequence]],
        room: Mapping[int, int],
        decode: bool,
    ) -> list[list[int]]:
        """`batch` is that of the step before, which computed the tokens `computed` of each group. `asking` are
        sequences of each group that now have one token more, room[id] is the number of tokens to guess of each. -> as
        many guesses for each of these as there is room for the most"""
        dp, depth = self.engine.parallel.attn_dp, max(room.values(), default=0)
        counts = tuple(map(len, asking)) if depth else (0,) * len(asking)
        padded = self.engine.platform.padded_rows(max(counts)) if decode else 0
        wanted: list[Sequence | None] = [*asking[dp.rank]] if depth else []
        wanted += [None] * (padded - len(wanted))
        run, sizes = self.captured if decode else self.run, (padded,) * len(counts) if padded else counts
        ids, hidden = run(self._first(batch, computed[dp.rank], wanted, sizes))
        for sequence, begin, end in (one for of in computed for one in of):
            if sequence.taken == begin:
                sequence.taken = min(end, len(sequence.ids) - 1)
        guesses = [ids.clone()]
        for number in range(1, depth):
            rows = [(s, len(s.ids) - 2 + number) if s and number < room[s.id] else None for s in wanted]
            further = self._pack(rows, sizes)
            ids, hidden = run(dataclasses.replace(further, token_ids=ids, hidden=hidden))
            guesses.append(ids.clone())
        if not depth:
            return [[] for of in asking for _ in of]
        tokens: list[list[int]] = dp.gather_rows(torch.stack(guesses, 1)[: counts[dp.rank]], counts).tolist()
        return tokens

    def _first(
        self, batch: Batch, computed: ListOf[Computed], wanted: ListOf[Sequence | None], counts: tuple[int, ...]
    ) -> Batch:
        """The tokens after those of `batch`, of which the last one of each sequence `wanted` is to give a guess; None
        stands for padding."""
        next_ids, last = array("q"), {}
        for sequence, begin, end in computed:
            last[sequence.id] = len(next_ids) + max(len(sequence.ids) - 2 - begin, 0)
            next_ids += sequence.ids[begin + 1 : end + 1]
            next_ids.extend([0] * (end + 1 - max(len(sequence.ids), begin + 1)))  # after drafts that were wrong
        next_ids.extend([0] * (len(batch.token_ids) - len(next_ids)))
        return dataclasses.replace(
            batch,
            token_ids=tensor_of(next_ids),
            hidden=self.engine.hidden,
            recurrent=None,
            previous=None,
            logit_rows=tensor_of(array("q", (last[s.id] if s else 0 for s in wanted))),
            wanted_per_group=None if batch.sequence_parallel else counts,
        )

    def _pack(self, rows: ListOf[tuple[Sequence, int] | None], counts: tuple[int, ...]) -> Batch:
        return self.engine.packer.pack_positions(rows, counts, self.engine.aside)
