"""Teacher forcing: runs given token ids through the engine and returns logits, without sampling or an end
of sequence. For comparisons with
other engines, for perplexity, for benchmarks."""

from collections.abc import Sequence as ListOf

import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.schedule.scheduler import Scheduler
from umbra.executor.engine.schedule.sequence import Sequence, new_sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.plan.batch_limits import limits_of


class ForcedRun:
    """Sequences in the KV cache of `engine`, which nothing else may use meanwhile. Every rank makes the same calls."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.scheduler = Scheduler(
            limits_of(engine.case, engine.config, set_pages=engine.pages.set_pages),
            (),
            engine.pages,
            engine.parallel.attn_dp.rank,
        )
        self.sequences: list[Sequence] = []  # in the order in which they were added

    def add(self, prompts: ListOf[ListOf[int]], room: int, all_logits: bool = False) -> list[Tensor]:
        """Prefill `prompts`, each with room for `room` tokens more, in chunks of the case's `chunked_prefill_size`.
        -> for each prompt the logits of its last token (1, vocabulary), or with `all_logits` of all its tokens (tokens,
        vocabulary); every rank gets all of them."""
        added = self._admit(prompts, room)
        waiting, logits_of = [s for s in self.scheduler.running if s in added], dict[int, list[Tensor]]()
        while waiting:
            part = self.scheduler.chunk(waiting, self.scheduler.limits.prefill_tokens)
            waiting = [s for s in waiting if s not in part or not s.complete]
            for id, logits in self._run(part, False, all_logits).items():
                logits_of[id] = [*logits_of.get(id, []), logits] if all_logits else [logits]
        return [torch.cat(logits_of[s.id]) for s in added]

    def assume(self, prompts: ListOf[ListOf[int]], room: int) -> None:
        """Takes `prompts` for computed, whatever their pages hold: for measurements with long contexts."""
        for sequence in self._admit(prompts, room):
            sequence.num_computed = sequence.recurrent.at = len(sequence.ids)
            self.scheduler.slide(sequence)

    def extend(self, tokens: ListOf[int]) -> None:
        """Append a token to each sequence; the next `decode` computes it."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.ids.append(token)

    def replace(self, tokens: ListOf[int]) -> None:
        """Put a token in place of each sequence's last one; a decode step then computes that position again, though
        from recurrent states that have taken the token before."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.ids[-1] = token
            sequence.num_computed = sequence.recurrent.at = len(sequence.ids) - 1

    def decode(self) -> list[Tensor]:
        """One decode step of all sequences. -> the logits (1, vocabulary) of each; every rank gets all of them."""
        logits_of = self._run(self.scheduler.running, True, True)
        return [logits_of[s.id] for s in self.sequences]

    def decode_in_place(self) -> Tensor:
        """Like `decode`, but returns only the logits of this rank's data-parallel group, (sequences, vocabulary). The
        next step overwrites them."""
        return self._forward(self.scheduler.running, True, True)

    def close(self) -> None:
        """Give back all pages."""
        for sequence in self.scheduler.running:
            sequence.finish_reason = "length"
        self.scheduler.retire()
        self.sequences = []

    def _admit(self, prompts: ListOf[ListOf[int]], room: int) -> list[Sequence]:
        sampling = SamplingParams(max_tokens=room)
        added = [new_sequence(len(self.sequences) + i, Request(tuple(ids), sampling)) for i, ids in enumerate(prompts)]
        for sequence in added:
            self.scheduler.add(sequence)
        self.scheduler.admit()
        if missing := [s for s in added if s not in self.scheduler.running]:
            raise UserError(
                f"offload_config.arena_mb: there is no room for {len(missing)} of {len(added)} sequences that are to "
                "run together: let fewer run together (--batch), or set a larger arena"
            )
        self.sequences += added
        return added

    def _run(self, running: list[Sequence], decode: bool, all_logits: bool) -> dict[int, Tensor]:
        """One step. -> the logits of each sequence by its id"""
        rows = {s.id: s.new_tokens if all_logits else 1 for s in running}
        dp = self.engine.parallel.attn_dp
        counts = tuple(sum(rows[s.id] for s in running if s.group == g) for g in range(dp.size))
        logits = self._forward(running, decode, all_logits)
        everyone = dp.gather_rows(logits[: counts[dp.rank]].float(), counts).cpu().clone()
        parts = everyone.split([rows[s.id] for s in running])
        return dict(zip((s.id for s in running), parts, strict=True))

    @torch.inference_mode()
    def _forward(self, running: list[Sequence], decode: bool, all_logits: bool) -> Tensor:
        with self.engine.step(decode):
            self.scheduler.reserve(running)
            batch = self.engine.pack(self.scheduler.by_group(running), decode, all_logits)
            logits = self.engine.forward(batch, decode)
        for sequence in running:
            sequence.num_computed, sequence.limit = sequence.end, None
            self.scheduler.slide(sequence)
        self.scheduler.advance(running)
        return logits
