"""Drafts with recurrent states on Ascend: numbers of the ops in steps of graphs and in others, against the reference;
tokens and graphs of a model."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ascend.engine import HYBRID, PROMPTS, ascend_case, ascend_runner, generate, prefilled
from tests.ascend.ge import ge_programs
from tests.ascend.log import device_log
from tests.ascend.ranks import run_ranks
from tests.variants import thorough_after
from umbra.executor.engine.drafts.drafts import Drafts
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.ops import reference
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.recurrent import GraphStrips
from umbra.ops.interface import Recurrent, fixed

TAPS, UNIT, PLACES, MOST = 4, 48, 14, 4
KEYS, HEADS, DEPTH, WIDTH = 2, 4, 24, 48
CHANNELS = 2 * KEYS * DEPTH + HEADS * WIDTH


class Layer:
    """The states of a layer in places that overlap, of which every `units`-th is used, and the last one by padding."""

    def __init__(self, ops: Any, drafts: int, device: str, by_row: bool):
        self.decays = HEADS * (DEPTH if by_row else 1)
        kept = (CHANNELS + HEADS * WIDTH) // 2 + self.decays + HEADS
        shapes = (HEADS, DEPTH, WIDTH), (TAPS - 1 + drafts, CHANNELS), (drafts, kept)
        sizes = [math.prod(shape) for shape in shapes]
        self.ops, self.device, self.units = ops, device, -(-sum(sizes) // UNIT)
        arena = torch.full((PLACES * self.units, UNIT), torch.nan)
        arena[-self.units :] = 0
        flat, views = arena.view(-1).to(device), []
        for shape, first in zip(shapes, itertools.accumulate(sizes, initial=0), strict=False):
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            count = (len(flat) - first - math.prod(shape)) // UNIT + 1
            views.append(fixed(flat.as_strided((count, *shape), (UNIT, *strides), first)))
        self.delta, self.conv, self.inputs = views
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(TAPS, CHANNELS, generator=generator) / 2, torch.rand(HEADS, generator=generator) * 4
        self.weight, self.rates = (x.to(device) for x in weights)
        self.bias = self.rates.repeat_interleave(self.decays // HEADS)
        self.strips = GraphStrips([(self.conv, self.inputs, self.delta)], MOST)

    def run(self, rows: Tensor, sequences: list[tuple[int, ...]], graph: bool) -> Tensor:
        """Takes (rows, read, write, mark, marked, pending) of each sequence, and returns the outputs of their rows."""
        table = torch.tensor(sequences + [(0, -1, -1, 0, -1, 0)] * (len(rows) - len(sequences)), dtype=torch.int32)
        lens, reads, writes, marks, marked, pending = table.unbind(1)
        reads, writes, marked = (torch.where(x < 0, x, x * self.units) for x in (reads, writes, marked))
        at = Recurrent(torch.cat((lens[:1] * 0, lens.cumsum(0))).long(), reads, writes, marks, marked, pending)
        if graph:
            at = self.strips.tables(Recurrent(at[0], *(x[None] for x in at[1:])))
            at = Recurrent(at[0].to(self.device), *(x[0].to(self.device) for x in at[1:]))
        x, b, a = rows.to(self.device).split([CHANNELS, HEADS, self.decays], 1)
        qkv = self.ops.causal_conv(x, self.weight, self.conv, at)
        out = self.ops.gated_delta_rule(qkv, a, b, self.rates, self.bias, self.delta, self.inputs, at)
        return out.cpu()[: int(lens.sum())]

    def kept(self, number: int) -> tuple[Tensor, Tensor]:
        state = self.delta[number * self.units].cpu()
        if self.ops is not reference:
            state = state.reshape(HEADS, WIDTH, DEPTH).mT
        return state, self.conv[number * self.units][: TAPS - 1].cpu()


def follows(seed: int, drafts: int, graph: bool, by_row: bool) -> None:
    """Steps of three sequences with drafts of which some come true, in place or into another place, some with a
    checkpoint after a pending row."""
    choose, device = random.Random(seed), torch.device("npu")
    torch.manual_seed(seed)
    ours = Layer(AscendOps(torch.float32, device, "fusion_v2"), drafts, "npu", by_row)
    wanted = Layer(reference, drafts, "cpu", by_row)
    live, free = [(0, 0), (1, 0), (2, 0)], list(range(3, PLACES - 1))  # place, pending
    step: list[tuple[int, ...]] = [(choose.randint(1, 9), -1, number, 0, 0, 0) for number, _ in live]
    for number in range(6):
        padding = choose.randint(0, 2)
        rows = torch.randn(sum(n for n, *_ in step) + padding, CHANNELS + HEADS + ours.decays)
        rows[len(rows) - padding :] = torch.nan
        expected = wanted.run(rows, step, False)
        torch.testing.assert_close(ours.run(rows, step, graph and number > 0), expected, atol=2e-5, rtol=1e-4)
        for state in {max(write, marked if mark else write) for _, _, write, mark, marked, _ in step}:
            for mine, right in zip(ours.kept(state), wanted.kept(state), strict=True):
                torch.testing.assert_close(mine, right, atol=2e-5, rtol=1e-4)
        step = []
        for i, (state, pending) in enumerate(live):
            guessed, to = choose.randint(0, drafts), choose.choice([state, free.pop(0)])
            if guessed:
                step.append((1 + guessed, state, -1, pending + 1, to, pending))
            else:
                step.append((1, state, to, choose.randint(0, pending), free.pop(0), pending))
            live[i] = to, choose.randint(0, guessed)
        free = [number for number in range(PLACES - 1) if number not in [kept for kept, _ in live]]


def all_follow(rank: int) -> None:
    from tests.ascend import computing

    computing.start()
    for graph, by_row in itertools.product((True, False), repeat=2):
        follows(1, 3, graph, by_row)


def test_steps_are_the_reference() -> None:
    run_ranks(all_follow, 1)


class Guesses(Drafts[Sequence]):
    """Right ones and wrong ones, in numbers that differ from step to step."""

    def __init__(self, most: int, texts: list[list[int]]):
        super().__init__(most)
        self.texts, self.right, self.all = texts, 0, 0

    def propose(self, sequences: Any, room: Any) -> None:
        for s in sequences:
            most = room(s)
            (text,) = (text for text in self.texts if text[: len(s.ids)] == list(s.ids))
            at = len(s.ids)
            for i in range(at, min(at + (at * 7 + s.ids[0]) % (self.most + 1), at + most, len(text) - 1)):
                s.ids.append(text[i] if i % 5 else (text[i] + 1) % 96)
                s.drafted += 1

    def accept(self, sequence: Sequence, chosen: Any) -> Any:
        self.all += sequence.drafted
        tokens = super().accept(sequence, chosen)
        self.right += len(tokens) - 1
        return tokens


def answers(rank: int, folder: Path, mode: str) -> tuple[list[list[int]], int, int]:
    from tests.ascend import computing

    computing.start()
    more = f"exe_mode={mode}", "strict=true", "max_new_tokens=24"
    plain = generate(ascend_runner(ascend_case(folder, *more, family=HYBRID), folder))
    runner = ascend_runner(
        ascend_case(folder, *more, "draft_config.method=lookup", "draft_config.tokens=3", family=HYBRID), folder
    )
    texts = [prompt + s.generated for prompt, s in zip(PROMPTS, plain, strict=True)]
    guesses = runner.loop.scheduler.drafts = Guesses(3, texts)
    assert [s.generated for s in generate(runner)] == [s.generated for s in plain]
    return texts, guesses.right, guesses.all


@pytest.mark.thorough
def test_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    modes = "eager", "acl_graph", "npugraph_ex", "ge_graph"
    runs = [run_ranks(answers, 1, tmp_path, mode)[0] for mode in modes]
    assert all(run == runs[0] for run in runs)
    assert 20 < runs[0][1] < runs[0][2]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", thorough_after(1, ["acl_graph", "ge_graph"]))
def test_a_graph_copies_no_states_whole(tmp_path: Path, mode: str) -> None:
    """A step reads and writes each state in strips; how many kernels that takes is in docs/ascend.md."""
    torch._dynamo.reset()
    case = ascend_case(
        tmp_path,
        f"exe_mode={mode}",
        "strict=true",
        "draft_config.method=lookup",
        "draft_config.tokens=3",
        family=HYBRID,
    )
    runner = ascend_runner(case, tmp_path)
    prefilled(runner)
    with ge_programs() as programs, device_log() as log:
        runner.loop.step()
    if mode == "ge_graph":
        (program,) = programs
        assert not program.of("TensorMove", "Assign", "TensorScatterUpdate")
        assert [out.shape for out in program.outputs()] == [(4, 96)]
        assert program.count()["ScatterNdUpdate"] == 3 + 2
    else:
        kernels = [line.split()[1].removeprefix("aclnn") for line in log.lines if line.startswith("captured acl")]
        first, last = kernels.index("Mm"), kernels.index("SwiGlu")
        assert (last - first - 3, kernels[first:last].count("ScatterNdUpdate")) == (85, 3)
