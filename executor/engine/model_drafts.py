"""Guesses of the next tokens by a model's own layer for it (models/layers/mtp.py), or by an EAGLE3 head made for the
model (models/layers/eagle3.py), after each step.

The layer takes every token that a step has computed, with the token after it, and caches what it keeps of it in pages
of the sequence, as the other layers do. From the last token of each sequence it guesses the one after the next;
further guesses go on from its own hidden state and its guess. What it caches of guessed tokens is written again once
the tokens are known; nothing but guesses reads it. Where guessing does not pay, hidden states are kept, and the layer
takes their tokens together later. Those of a request that ends meanwhile are lost, so that guesses for prompts that go
on from its answer may be worse.
"""

import dataclasses
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from executor.engine.batching import pack_rows
from executor.engine.engine import Engine
from executor.engine.sequence import Sequence
from executor.platform.base import Step
from models.batch import Batch
from ops.interface import tensor_of

MOST_KEPT = 256  # steps whose hidden states are kept for later

# A sequence, and the first position and the last one, plus one, that a step computed.
Computed = tuple[Sequence, int, int]


class ModelDrafter:
    def __init__(self, engine: Engine):
        self.engine = engine
        model, platform = engine.model, engine.platform
        self.run: Step = lambda batch: model.guess(batch.to(platform.device))
        eager, most = engine.case.exe_mode == "eager", engine.case.draft_config.most
        self.captured = self.run if eager else platform.compile(model.guess, engine.config, most)
        # Of steps whose tokens are to be taken later: hidden states, and (sequence, first position, number of rows,
        # those of them that are certain) of each sequence.
        self._kept: list[tuple[Tensor, list[tuple[Sequence, int, int, int]]]] = []

    def guess(
        self, batch: Batch, computed: ListOf[ListOf[Computed]], finished: ListOf[ListOf[Sequence]],
        room: Mapping[int, int], decode: bool,
    ) -> list[list[int]]:  # fmt: skip
        """`batch` is that of the step before, which computed the tokens `computed` of each group. `finished` are the
        sequences of each group that now have one token more, room[id] is the number of tokens to guess of each. -> as
        many guesses for each sequence of all groups as there is room for the most"""
        dp, depth = self.engine.parallel.attn_dp, max(room.values(), default=0)
        late = [
            [(s, s.taken, begin) for s, begin, _ in of if s.taken < begin and not s.finish_reason] for of in computed
        ]
        if any(late):
            self._take(late)
        counts = tuple(map(len, finished)) if depth else (0,) * len(finished)
        padded = self.engine.platform.padded_rows(max(counts)) if decode else 0
        wanted: list[Sequence | None] = [*finished[dp.rank]] if depth else []
        wanted += [None] * (padded - len(wanted))
        run, sizes = self.captured if decode else self.run, (padded,) * len(counts) if padded else counts
        ids, found = run(self._first(batch, computed[dp.rank], wanted, sizes))
        for sequence, _, end in (one for of in computed for one in of):
            sequence.taken = min(end, len(sequence.ids) - 1)
        guesses = [ids.clone()]
        for number in range(1, depth):
            rows = [(s, len(s.ids) - 2 + number) if s and number < room[s.id] else None for s in wanted]
            further = self._pack(rows, sizes)
            ids, found = run(dataclasses.replace(further, token_ids=ids, hidden=found))
            guesses.append(ids.clone())
        if not depth:
            return [[] for of in finished for _ in of]
        tokens: list[list[int]] = dp.gather_rows(torch.stack(guesses, 1)[: counts[dp.rank]], counts).tolist()
        return tokens

    def skip(self, computed: ListOf[ListOf[Computed]]) -> None:
        """Gives up the tokens of a step after which nothing is to be guessed: later guesses may be worse."""
        self._kept.clear()
        for sequence, _, end in (one for of in computed for one in of):
            sequence.taken = min(end, len(sequence.ids) - 1)

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
            batch, token_ids=tensor_of(next_ids), hidden=self.engine.hidden, recurrent=None,
            logit_rows=tensor_of(array("q", (last[s.id] if s else 0 for s in wanted))),
            wanted_per_group=None if batch.sequence_parallel else counts,
        )  # fmt: skip

    def keep(self, computed: ListOf[ListOf[Computed]]) -> None:
        """Keeps the hidden states of a decode step, which computed the tokens `computed` of each group, for later."""
        if self.engine.hidden is not None:
            mine = computed[self.engine.parallel.attn_dp.rank]
            rows = [(s, begin, end - begin, len(s.ids) - 1 - begin) for s, begin, end in mine]
            self._kept.append((self.engine.hidden.clone(), rows))
        if len(self._kept) == MOST_KEPT:
            running = [[s for s, _, _ in of if not s.finish_reason] for of in computed]
            with torch.inference_mode():
                self._take([[(s, s.taken, len(s.ids) - 1) for s in of] for of in running])

    def _take(self, late: ListOf[ListOf[Computed]]) -> None:
        """Lets the layer take tokens of each group whose hidden states were kept."""
        counts = tuple(sum(end - begin for _, begin, end in of) for of in late)
        mine = late[self.engine.parallel.attn_dp.rank]
        rows = [(sequence, position) for sequence, begin, end in mine for position in range(begin, end)]
        ids = array("q", (sequence.ids[position + 1] for sequence, position in rows))
        parts: dict[int, list[Tensor]] = {sequence.id: [] for sequence, _, _ in mine}
        for states, kept in self._kept:
            row = 0
            for sequence, begin, count, certain in kept:
                if begin >= sequence.taken and sequence.id in parts:  # else it was preempted since
                    parts[sequence.id].append(states[row : row + certain])
                row += count
        self._kept = []
        hidden = [] if self.engine.hidden is None else [self.engine.hidden[:0]]  # a group may have no tokens
        hidden += [part for of in parts.values() for part in of]
        self.run(
            dataclasses.replace(
                self._pack(rows, counts), token_ids=tensor_of(ids), hidden=torch.cat(hidden),
                logit_rows=tensor_of(array("q")), wanted_per_group=(0,) * len(counts),
            )
        )  # fmt: skip
        for sequence, _, end in (one for of in late for one in of):
            sequence.taken = end

    def _pack(self, rows: ListOf[tuple[Sequence, int] | None], counts: tuple[int, ...]) -> Batch:
        engine = self.engine
        return pack_rows(
            engine.platform.ops, rows, engine.pages, counts, engine.table_width, engine.layer_sets, engine.aside
        )
