"""All layers' caches in one arena: the same logits, bit for bit, whatever the rest of the arena contains."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_offload.memory.arena import Arena
from executor.config.case import Case
from executor.engine.kv_caches import bind_arena, frame_of
from executor.engine.loop import Loop
from executor.engine.pages import ElasticPages
from executor.engine.weight_formats import build_of
from executor.model_runner import ModelRunner
from models.batch import Batch
from tests.spy import spy_on
from tests.tiny import make_runner, save_tiny, tiny_case

PROMPTS = [("a", [5, 17, 3]), ("b", [7]), ("c", list(range(30, 53))), ("d", [11, 12]), ("e", [90, 3, 3, 8]), ("f", [6])]
NAN = 0xFF  # every byte: not a number in each float type, scales of int8 among them
SLOT = 3000  # bytes, of a made-up expert


def watch(runner: ModelRunner, **hooks: Callable[[Any], object]) -> list[Tensor]:
    """The logits of every step, from now on; `hooks` as `spy_on` takes them."""
    logits: list[Tensor] = []
    spy_on(runner, **hooks, after=lambda out: logits.append(out.clone()))
    return logits


def with_arena(case: Case, runner: ModelRunner, frames: int, slots: list[int]) -> tuple[Arena, Tensor]:
    """Gives the runner caches in an arena. `slots` are the slots that are taken, which are evicted in this order."""
    build = build_of(case, runner.engine.platform.ops, runner.engine.parallel, runner.engine.platform.device, True)
    model = runner.engine.model
    units, frame_bytes = frame_of(model, case, build)
    arena = Arena(frames, frame_bytes, SLOT, units)
    unit = frame_bytes // units
    for spare, more in ((1, 1), (unit, 1), (unit + 1, 2)):
        assert bind_arena(model, case, build, 1, spare).nbytes == frame_bytes + more * unit
    buffer = bind_arena(model, case, build, frames)
    assert buffer.nbytes == frames * frame_bytes
    assert buffer.data_ptr() % 64 == 0

    def make_room(frames: int) -> None:
        for slot in arena.leaving(slots, frames):
            slots.remove(slot)
            arena.give_slot(slot)

    raw = buffer.view(frames, -1)

    def copy(old: int, new: int) -> None:
        raw[new // units].copy_(raw[old // units])

    pool = ElasticPages(arena, case.cache_config.page_size, 0, make_room, copy)
    runner.engine.pages = pool
    runner.loop = Loop(runner.engine, runner.loop.stop_ids)
    return arena, buffer


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
def test_an_arena_of_experts_and_pages_gives_the_same_logits(tmp_path: Path, mode: str, kv_dtype: str) -> None:
    """Before every step slots are taken and given back, a page moves, and all bytes that no page holds become
    garbage."""
    save_tiny(tmp_path / "model", eos_token_id=None, num_hidden_layers=3)
    case = tiny_case(
        tmp_path, tmp_path / "model", exe_mode=mode, cache_config={"kv_dtype": kv_dtype}, data_config={"batch_size": 3}
    )
    plain = make_runner(case, tmp_path)
    expected_logits = watch(plain)
    expected = [s.generated for _ in range(2) for s in plain.model_generate(PROMPTS)]

    runner, dice = make_runner(case, tmp_path), random.Random(1)
    slots: list[int] = []
    arena, buffer = with_arena(case, runner, 3 * 8 + 1, slots)  # the three longest and no expert just fit
    raw = buffer.view(-1).view(torch.uint8)  # all bytes
    raw.fill_(NAN)
    used: list[set[int]] = []

    def garbage(batch: Batch) -> None:
        while slots and dice.random() < 0.5:
            arena.give_slot(slots.pop(dice.randrange(len(slots))))
        while dice.random() < 0.7 and (slot := arena.take_slot()) is not None:
            slots.append(slot)
            raw[arena.slot_offset(slot) :][: arena.slot_bytes] = NAN
        held = {b.page // arena.units for s in runner.loop.scheduler.running for b in s.blocks}
        for frame in set(range(arena.frames)) - held:
            raw[frame * arena.frame_bytes :][: arena.frame_bytes] = NAN
        used.append(held)

    moves = list[tuple[int, int]]()

    def anywhere(stays: int) -> list[tuple[int, int]]:
        """Moves any page of any sequence to any free frame, which is more than the arena itself does."""
        held = [b.page for s in runner.loop.scheduler.running for b in s.blocks]
        if not held or (new := arena.take_page()) is None:
            return []
        moves.append((dice.choice(held), new))
        arena.give_page(moves[-1][0])
        return moves[-1:]

    def gather(sequences: list[Any]) -> None:
        pool = runner.loop.scheduler.pools[0]
        assert isinstance(pool, ElasticPages)
        pool.gather()

    arena.gather = anywhere  # type: ignore[method-assign]
    logits = watch(runner, before_pack=gather, before=garbage)
    assert [s.generated for _ in range(2) for s in runner.model_generate(PROMPTS)] == expected
    assert len(logits) == len(expected_logits)
    assert all(torch.equal(*pair) for pair in zip(logits, expected_logits, strict=True))
    assert len(moves) > len(logits) / 2
    assert sum(map(len, used)) > 3 * len(set.union(*used))  # pages were used again and again
    assert arena.free_frames + arena.slot_frames == arena.frames - 1  # all pages but the padding rows' were given back
