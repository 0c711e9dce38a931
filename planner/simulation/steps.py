"""The time of any step of a layout, from the same model as the plan's, kept in tables since a simulation asks often.
Where tokens are guessed, a decode step here is the part of one that a token of each sequence takes."""

import dataclasses
from functools import lru_cache

import numpy as np

from umbra.executor.engine.schedule.scheduler import Step
from umbra.planner.layouts import Layout
from umbra.planner.times import Placing, step_times

SHARES = 64  # shares of resident experts are rounded to multiples of 1 / SHARES
TOKENS, CACHED = 64, 1024  # prefill steps are counted for multiples of these, and times between them interpolated


class StepTimes:
    def __init__(self, layout: Layout, longest: int):
        """`longest` is the number of tokens of the longest sequence."""
        self.layout, self.longest = layout, longest
        self.decode_at = lru_cache(None)(self._decode_at)
        self.prefill_at = lru_cache(None)(self._prefill_at)
        self.exposed_at = lru_cache(None)(self._exposed_at)

    def seconds(self, step: Step, groups: int, resident: float) -> float:
        """The time of a step: that of the data-parallel group with the most to do, since groups wait for each other.
        `resident`: the share of the experts that it uses which the devices hold."""
        if step.decode:
            return self.decode_steps(step, groups, resident, 1)[0][0]
        share = round(resident * SHARES) / SHARES
        tokens, seen, decoding = [0] * groups, [0] * groups, [0] * groups
        for s in step.sequences:
            tokens[s.group] += s.new_tokens
            if s.decoding:
                decoding[s.group] += s.num_computed
            else:
                seen[s.group] = max(seen[s.group], s.num_computed)
        busiest = max(range(groups), key=lambda group: tokens[group])
        # Those that decode read what they have cached.
        extra = self.decode(1, decoding[busiest], share) - self.decode(1, 0, share)
        return self.prefill(tokens[busiest], seen[busiest], share) + extra

    def decode_steps(self, step: Step, groups: int, resident: float, count: int) -> tuple[list[float], float]:
        """The times of `count` decode steps in a row, of which `step` is the first, and for how long of all of them the
        devices wait for shadow experts."""
        share = round(resident * SHARES) / SHARES
        rows, cached = [0] * groups, [0] * groups
        for s in step.sequences:
            rows[s.group] += 1
            cached[s.group] += s.num_computed
        most = max(rows)
        first = max(cached) / most
        start = self.decode(most, first, share)
        seconds = [start]
        if count > 1:
            last = count - 1  # every sequence has so many tokens more in the last step, in which time is linear
            ends = [c + last * r for c, r in zip(cached, rows, strict=True)]
            rise = self.decode(most, max(ends) / most, share) - start
            if ends[cached.index(max(cached))] == max(ends):  # the same group has the most to do in all steps
                growth = rise / last
                seconds = [start + growth * i for i in range(count)]
            else:
                most_cached = (np.array(cached)[:, None] + np.array(rows)[:, None] * np.arange(count)).max(axis=0)
                more = most_cached / most - first
                seconds = (start + rise / more[last] * more).tolist()
        return seconds, count * self.exposed_at(most, share)

    def decode(self, sequences: int, cached: float, resident: float) -> float:
        """A decode step of `sequences` sequences of a group with `cached` tokens each, in which time is linear."""
        none, some = self.decode_at(sequences, resident)
        return none + (some - none) * cached / self.longest

    def _decode_at(self, sequences: int, resident: float) -> tuple[float, float]:
        placing = self._placing(resident)
        none, some = (self.layout.token_times(sequences, cached, placing) for cached in (0, self.longest))
        return none.total, some.total

    def _exposed_at(self, sequences: int, resident: float) -> float:
        return self.layout.token_times(sequences, 0, self._placing(resident)).parts["shadow experts"]

    def _placing(self, resident: float) -> Placing:
        return dataclasses.replace(self.layout.placing, resident=resident)

    def prefill(self, tokens: int, cached: int, resident: float) -> float:
        """A step of `tokens` tokens of prompts of a group, of which the longest has `cached` tokens before them."""
        low, part = divmod(tokens, TOKENS)
        least = max(low * TOKENS, 1)
        nearest = cached // CACHED * CACHED
        before, after = (self.prefill_at(size, nearest, resident) for size in (least, (low + 1) * TOKENS))
        return before + (after - before) * part / TOKENS

    def prompt_step_s(self, tokens: float, resident: float) -> float:
        """A step of so many prompt tokens of a group, for any share of resident experts."""
        low, part = divmod(resident * SHARES, 1)
        shares = low / SHARES, min((low + 1) / SHARES, 1.0)
        before, after = (self.prefill(max(int(tokens), 1), 0, share) for share in shares)
        return before + (after - before) * part

    def _prefill_at(self, tokens: int, cached: int, resident: float) -> float:
        work = self.layout.counted.prefill(tokens, cached)
        return step_times(work, self._placing(resident), self.layout.hardware).total
