"""Writes the logits of given token ids, to compare engines: all sequences run in one batch, then N greedy steps.

Writes float32 arrays for each sequence i: prefill_i (tokens, vocabulary), decode_i (N, vocabulary), and ids_i, the
given ids followed by the N chosen ones, so that row t of prefill_i and decode_i together belongs to token ids_i[t].
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from umbra.base.errors import UserError
from umbra.base.files import write_whole
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv, rank_env
from umbra.executor.config.load import load_model_config
from umbra.executor.engine.step.teacher_forcing import ForcedRun
from umbra.executor.launch.launch import launch
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import ModelRunner, make_runner


def parse_ids(text: str, vocabulary: int) -> list[list[int]]:
    """Parses "1,2,3;7,8" into [[1, 2, 3], [7, 8]]."""
    try:
        rows = [[int(part) for part in row.split(",")] for row in text.split(";")]
    except ValueError:
        raise UserError(f'--ids {text!r:.60}: write numbers like "1,2,3;7,8"') from None
    for token in (t for row in rows for t in row):
        if not 0 <= token < vocabulary:
            raise UserError(f"--ids: {token} is outside the vocabulary of {vocabulary}")
    return rows


def sized_for(case: Case, ids: list[list[int]], steps: int) -> Case:
    """The case with room for exactly these sequences in one batch."""
    return with_room(case, len(ids), max(map(len, ids)), steps + 1)


def with_room(case: Case, sequences: int, longest: int, new_tokens: int) -> Case:
    """The case with room for `sequences` sequences at once, rounded up to an equal share of each data-parallel
    group."""
    batch_size = -(-sequences // case.attn_dp_size) * case.attn_dp_size
    data = dataclasses.replace(
        case.data_config, input_max_len=longest, max_new_tokens=new_tokens, batch_size=batch_size
    )
    return dataclasses.replace(case, data_config=data)


def collect_logits(runner: ModelRunner, ids: list[list[int]], steps: int) -> dict[str, np.ndarray]:
    """The arrays by their names in the file, the same on every rank."""
    forced, tokens = ForcedRun(runner.engine), [list(row) for row in ids]
    prefill = forced.add(ids, steps + 1, all_logits=True)
    last, decode = prefill, [logits[:0] for logits in prefill]
    for _ in range(steps):
        chosen = [int(logits[-1].argmax()) for logits in last]
        for row, token in zip(tokens, chosen, strict=True):
            row.append(token)
        forced.extend(chosen)
        last = forced.decode()
        decode = [torch.cat(parts) for parts in zip(decode, last, strict=True)]
    forced.close()
    arrays: dict[str, np.ndarray] = {}
    for i, (before, after, row) in enumerate(zip(prefill, decode, tokens, strict=True)):
        arrays |= {f"prefill_{i}": before.numpy(), f"decode_{i}": after.numpy(), f"ids_{i}": np.array(row)}
    return arrays


def prefill_logits(runner: ModelRunner, ids: list[list[int]]) -> list[torch.Tensor]:
    """(tokens, vocabulary) of each sequence, in the order of `ids`; nothing stays in the cache."""
    forced = ForcedRun(runner.engine)
    logits = forced.add(ids, 1, all_logits=True)
    forced.close()
    return logits


def write_logits(case: Case, ids: str, steps: int, out: Path, results: Path | None, program: list[str]) -> None:
    """Write the logits of `ids` and of `steps` greedy steps to `out`.

    With several ranks, every rank is started as `program`, which must call this with the case of its launcher and the
    same other arguments.
    """
    if steps < 0:
        raise UserError(f"--steps {steps}: must not be negative")
    rows = parse_ids(ids, load_model_config(case).vocab_size)
    case = sized_for(case, rows, steps)
    load_model_config(case)  # checked again, since the lengths have changed
    if case.world_size > 1 and not rank_env().launched:
        return launch(case, program)

    def write(results: Path, ranks: RankEnv) -> None:
        runner = make_runner(case, results, ranks)
        runner.setup()
        arrays = collect_logits(runner, rows, steps)
        if ranks.rank == 0:
            write_whole(out, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
            print(f"wrote {out}: {len(rows)} sequences, {steps} steps")

    run_rank(case, results, write)
