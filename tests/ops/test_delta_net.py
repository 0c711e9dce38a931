"""Gated DeltaNet's ops, and Kimi delta attention's: the reference against transformers, the native kernels against the
reference, and the bits of these, which depend on no schedule."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers.models.glm5_next import modeling_glm5_next as glm5
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from umbra.base.errors import UserError
from umbra.ops import reference
from umbra.ops.cpu import engine
from umbra.ops.cpu import ops as cpu
from umbra.ops.interface import Recurrent

KERNEL, AHEAD = 4, 3
UNIT = 64  # floats between places, less than a state
SETS = engine.module.instruction_sets()
VECTORS = [s for s in ("generic", "avx2", SETS[-1]) if s in SETS]  # sets with kernels of their own
# Decays of heads, and of each row of their states, of both kinds.
DECAYS: dict[str, dict[str, Any]] = {"heads": {}, "rows": {"by_row": True}, "bounded": {"by_row": True, "lowest": -5.0}}


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    torch.manual_seed(11)
    engine.start(1, "auto")
    yield
    engine.start(1, "auto")


def recurrent(*sequences: Sequence[int]) -> Recurrent:
    """Takes (rows, read, write, mark, marked) of each sequence, and the number of pending rows."""
    lens, *places = zip(*(s if len(s) > 5 else (*s, 0) for s in sequences), strict=True)
    starts = torch.tensor([0, *itertools.accumulate(lens)])
    return Recurrent(starts, *(torch.tensor(numbers, dtype=torch.int32) for numbers in places))


class Layer:
    """The states and the weights of a layer in an arena of `places` sets, and what its ops compute of them."""

    def __init__(
        self,
        ops: Any,
        heads: tuple[int, int],
        depth: int,
        width: int,
        places: int = 6,
        by_row: bool = False,
        lowest: float = 0.0,
    ):
        self.ops, (self.key_heads, self.heads), self.depth, self.width = ops, heads, depth, width
        self.decays, self.lowest = self.heads * (depth if by_row else 1), lowest
        self.channels = 2 * self.key_heads * depth + self.heads * width
        size = self.heads * depth * width
        rows, kept = KERNEL - 1 + AHEAD, (self.channels + self.heads * width) // 2 + self.decays + self.heads
        every = size + rows * self.channels + AHEAD * kept
        self.units = -(-every // UNIT)
        self.arena = torch.full((places * self.units * UNIT,), torch.nan)
        units = (len(self.arena) - every) // UNIT + 1
        self.states = self.arena.as_strided(
            (units, self.heads, depth, width), (UNIT, depth * width, width, 1)
        )  # overlapping places of which every `units`-th is used
        self.inputs = self.arena.as_strided((units, rows, self.channels), (UNIT, self.channels, 1), size)
        self.ahead = self.arena.as_strided((units, AHEAD, kept), (UNIT, kept, 1), size + rows * self.channels)
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(KERNEL, self.channels, generator=generator) / 2
        self.rates = torch.rand(self.heads, generator=generator).mul(4).add(0.01)
        self.dt_bias = torch.randn(self.decays, generator=generator) - 2

    def run(self, rows: Tensor, *sequences: Sequence[int]) -> Tensor:
        """rows (T, channels + heads + decays): x, b and a side by side, as one product makes them"""
        at = recurrent(
            *(
                (n, r if r < 0 else r * self.units, w if w < 0 else w * self.units, m, p * self.units, *more)
                for n, r, w, m, p, *more in sequences
            )
        )
        x, b, a = rows.split([self.channels, self.heads, self.decays], 1)
        qkv = self.ops.causal_conv(x, self.weight, self.inputs, at)
        states = self.states, self.ahead, at, self.lowest
        out: Tensor = self.ops.gated_delta_rule(qkv, a, b, self.rates, self.dt_bias, *states)
        return out

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.channels + self.heads + self.decays)

    def kept(self, number: int) -> tuple[Tensor, Tensor]:
        """A place's state, in the reference's order, and inputs."""
        state = self.states[number * self.units]
        if self.ops is cpu:
            slab = 16 if self.width % 32 else 32
            state = state.reshape(self.heads, -1, self.depth, slab).transpose(1, 2).reshape(state.shape)
        return state.clone(), self.inputs[number * self.units][: KERNEL - 1].clone()


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize(("heads", "depth", "width"), [((2, 4), 16, 16), ((2, 6), 24, 32), ((1, 1), 32, 16)])
def test_a_layer_is_transformers(ops: Any, heads: tuple[int, int], depth: int, width: int) -> None:
    config = Qwen3NextConfig(
        hidden_size=64,
        num_hidden_layers=1,
        linear_num_key_heads=heads[0],
        linear_num_value_heads=heads[1],
        linear_key_head_dim=depth,
        linear_value_head_dim=width,
        layer_types=["linear_attention"],
    )
    module = theirs.Qwen3NextGatedDeltaNet(config, 0)
    layer = Layer(ops, heads, depth, width)
    with torch.no_grad():
        module.in_proj_qkvz.weight.normal_()
        module.in_proj_ba.weight.normal_(0, 0.2)
        module.norm.weight.normal_(1, 0.3)
        module.conv1d.weight.copy_(layer.weight.T[:, None])
        module.A_log.copy_(layer.rates.log())
        module.dt_bias.copy_(layer.dt_bias)
        for length in (1, 2, 3, 4, 63, 64, 65, 130):
            x = torch.randn(1, length, 64)
            q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
            o = layer.run(torch.cat([part[0].flatten(1) for part in (q, k, v, b, a)], 1), (length, -1, 0, 0, 0))
            gate = torch.cat([z[0], z[0]], -1)[..., :width]  # tokens and heads lie apart, which the ops make good
            o = ops.gated_rms_norm(o, gate.contiguous(), module.norm.weight, config.rms_norm_eps)
            torch.testing.assert_close(module.out_proj(o.flatten(1)), module(x)[0], atol=3e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("lowest", [0.0, -5.0])
def test_a_layer_with_decays_of_rows_is_transformers(ops: Any, lowest: float) -> None:
    heads, depth, qkv = 3, 32, torch.randn(3, 67, 3 * 32)
    config = KimiLinearConfig(linear_num_heads=heads, linear_head_dim=depth, hidden_size=48, num_hidden_layers=1)
    config.linear_lower_bound = lowest
    gate = (glm5.Glm5NextTextForgetGate if lowest else kimi.KimiLinearForgetGate)(config)
    layer, x = Layer(ops, (heads, heads), depth, depth, by_row=True, lowest=lowest), torch.randn(1, 67, 48)
    gate.A_log.copy_(layer.rates.log().view_as(gate.A_log))
    gate.dt_bias.copy_(layer.dt_bias.view_as(gate.dt_bias))
    gate.f_b_proj.weight *= 4
    a, b = gate.f_b_proj(gate.f_a_proj(x))[0], torch.randn(67, heads)
    by_head = [part.unflatten(1, (heads, depth))[None] for part in qkv]
    expected, state = kimi.chunk_kimi_delta_attention(
        *by_head, gate(x), b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    rows = qkv.transpose(0, 1).flatten(1), a, b, layer.rates, layer.dt_bias
    out = ops.gated_delta_rule(*rows, layer.states, layer.ahead, recurrent((67, -1, 0, 0, 0)), lowest)
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.kept(0)[0], state[0], atol=1e-5, rtol=1e-4)
    norm = kimi.KimiLinearRMSNormGated(depth, eps=1e-3)
    z = torch.randn_like(out)
    ours = ops.gated_rms_norm(out, z, norm.weight, 1e-3, sigmoid=True)
    torch.testing.assert_close(ours, norm(out, z), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "depth", "width", "decays"),
    [
        ((2, 6), 24, 48, "heads"),
        ((16, 32), 128, 128, "heads"),
        ((2, 6), 24, 48, "rows"),
        ((4, 4), 128, 128, "rows"),
        ((2, 2), 40, 16, "bounded"),
    ],
)
@pytest.mark.parametrize("instruction_set", VECTORS)
def test_kernels_compute_the_reference(
    heads: tuple[int, int], depth: int, width: int, decays: str, instruction_set: str
) -> None:
    engine.start(2, instruction_set)
    ours, wanted = (Layer(ops, heads, depth, width, **DECAYS[decays]) for ops in (cpu, reference))
    steps = [
        [(1, -1, 0, 0, 0), (0, 3, 3, 0, 0), (2, -1, 1, 0, 0)],
        [(1, 0, 0, 0, 0), (5, 1, 2, 4, 3), (2, 1, -1, 1, 4)],
        [(3, 2, 2, 0, 0), (1, 3, 5, 1, 0), (1, 4, 4, 0, 0)],
    ]
    for step in steps:
        rows = ours.rows(sum(n for n, *_ in step) + 2)
        rows[-2:] = torch.nan  # padding
        torch.testing.assert_close(ours.run(rows, *step), wanted.run(rows, *step), atol=1e-5, rtol=1e-5)
    assert not ours.run(ours.rows(3), (1, 0, 0, 0, 0))[1:].any()
    wanted.arena[:], ours.arena[:] = wanted.arena.nan_to_num(), ours.arena.nan_to_num()
    for number in (1, 2, 3, 4, 5):
        for kept, expected in zip(ours.kept(number), wanted.kept(number), strict=True):
            torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decays", ["heads", "rows"])
@pytest.mark.parametrize("instruction_set", VECTORS)
def test_bits_depend_on_no_schedule(instruction_set: str, decays: str) -> None:
    """One prompt in one step, in others of any cuts, beside other sequences, on more threads, and from a mark."""
    length, others, new = 23, 3, partial(Layer, cpu, (2, 4), 32, 32, **DECAYS[decays])
    engine.start(1, instruction_set)
    first = new()
    rows, strange = first.rows(length), first.rows(others)
    whole = first.run(rows, (length, -1, 0, 0, 0))

    def check(*cuts: int, threads: int = 1, company: bool = False, moves: bool = False) -> None:
        engine.start(threads, instruction_set)
        layer, number, outs = new(), -1, []
        for start, end in itertools.pairwise((0, *cuts, length)):
            to = 2 - number if moves and number >= 0 else 1
            mine, step = (end - start, number, to, 0, 0), rows[start:end]
            if company:
                out = layer.run(torch.cat([strange, step, strange]), (others, -1, 3, 0, 0), mine, (others, -1, 4, 0, 0))
                outs.append(out[others:-others])
            else:
                outs.append(layer.run(step, mine))
            number = to
        assert torch.equal(torch.cat(outs), whole)
        assert all(torch.equal(a, b) for a, b in zip(layer.kept(number), first.kept(0), strict=True))

    for cut in range(1, length):
        check(cut)
    check(*range(1, length), threads=2, moves=True)
    check(2, 3, 9, 10, threads=2, company=True, moves=True)
    check(threads=2, company=True)
    for mark in (1, 2, 3, 17, length):
        layer = new()
        assert torch.equal(layer.run(rows, (length, -1, 0, mark, 1)), whole)
        if mark < length:  # two forks of the checkpoint, one of which keeps nothing
            rest, count = rows[mark:], length - mark
            out = layer.run(torch.cat([rest, rest]), (count, 1, 2, 0, 0), (count, 1, -1, 0, 0))
            assert torch.equal(out, torch.cat([whole[mark:], whole[mark:]]))
        for number in (0, 1 if mark == length else 2):
            assert all(torch.equal(a, b) for a, b in zip(layer.kept(number), first.kept(0), strict=True))


def test_drafts_are_replayed() -> None:
    """A step of drafts keeps its first row only; the next one begins with the rows that were right."""
    layer, wanted = Layer(cpu, (1, 2), 16, 16), Layer(cpu, (1, 2), 16, 16)
    rows = layer.rows(9)
    whole = wanted.run(rows, (9, -1, 0, 0, 0))
    layer.run(rows[:3], (3, -1, 0, 0, 0))
    wrong = torch.cat([rows[3:6], layer.rows(2)])
    assert torch.equal(layer.run(wrong, (5, 0, -1, 1, 1))[:3], whole[3:6])
    assert torch.equal(layer.run(rows[4:], (5, 1, 0, 0, 0)), whole[4:])
    assert all(torch.equal(a, b) for a, b in zip(layer.kept(0), wanted.kept(0), strict=True))


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_drafts_that_come_to_nothing_leave_no_trace(ops: Any, decays: str) -> None:
    """Steps with up to three drafts, of which some come true, in place or into another place; a checkpoint in between,
    also of rows that are pending, has the states of all rows before it."""
    new = partial(Layer, ops, (2, 4), 16, 32, **DECAYS[decays])
    layer, wanted = new(), new()
    same = partial(torch.testing.assert_close, atol=1e-5 * (ops is not cpu), rtol=1e-5 * (ops is not cpu))
    rows, random, at, pending, number = layer.rows(40), torch.Generator().manual_seed(1), 0, 0, -1
    whole = wanted.run(rows.clone(), (40, -1, 0, 0, 0))
    while at < 34:
        drafts, come = torch.randint(0, 4, (2,), generator=random).tolist()
        come, to = min(come, drafts), number if number >= 0 and at % 3 else (number + 1) % 3
        step = torch.cat((rows[at : at + 1 + come], layer.rows(drafts - come)))
        if drafts:
            out = layer.run(step, (1 + drafts, number, -1, pending + 1, to, pending))
        else:
            out = layer.run(step, (1, number, to, max(pending - 1, 0), 4, pending))
            if pending > 1:
                before = new()
                before.run(rows[: at - 1].clone(), (at - 1, -1, 0, 0, 0))
                same(layer.kept(4), before.kept(0))
        same(out[: 1 + come], whole[at : at + 1 + come])
        at, pending, number = at + 1 + come, come, to


def test_a_tape_reads_the_tables_of_each_replay() -> None:
    layer, wanted = (Layer(cpu, (2, 4), 32, 64) for _ in range(2))
    rows, tape = layer.rows(4), engine.Tape()
    rows[3] = torch.nan
    at = recurrent((1, -1, 0, 0, 0), (2, -1, layer.units, 0, 0))
    with tape.capture():
        x, b, a = rows.split([layer.channels, 4, 4], 1)
        qkv = cpu.causal_conv(x, layer.weight, layer.inputs, at)
        out = cpu.gated_delta_rule(qkv, a, b, layer.rates, layer.dt_bias, layer.states, layer.ahead, at)
    wanted.run(rows, (1, -1, 0, 0, 0), (2, -1, 1, 0, 0))
    for step in ([(2, 0, 2, 1, 3), (1, 1, 1, 0, 0)], [(0, 2, 2, 0, 0), (1, 3, 3, 0, 0)]):
        rows[:3] = layer.rows(3)
        for mine, new in zip(
            at,
            recurrent(*((n, r * layer.units, w * layer.units, m, p * layer.units) for n, r, w, m, p in step)),
            strict=True,
        ):
            mine.copy_(new)
        tape.replay()
        assert torch.equal(out, wanted.run(rows, *step))


def test_gates() -> None:
    wide, x = torch.randn(300, 2 * 3 * 40) * 20, torch.randn(300, 3, 40)
    gate, weight = wide.split(120, 1)[1], torch.randn(40)
    heads = gate.unflatten(1, (3, 40))
    expected = reference.gated_rms_norm(x, heads, weight, 1e-6)
    torch.testing.assert_close(cpu.gated_rms_norm(x, heads, weight, 1e-6), expected, atol=1e-5, rtol=1e-5)
    flat = x.flatten(1).contiguous()
    expected = reference.sigmoid_mul(flat.clone(), gate)
    torch.testing.assert_close(expected, flat * gate.sigmoid())
    assert cpu.sigmoid_mul(flat, gate) is flat
    torch.testing.assert_close(flat, expected, atol=1e-5, rtol=1e-5)


def test_impossible_sizes_are_named() -> None:
    for heads, sizes, message in (
        ((1, 1), (16, 24), "linear_value_head_dim: 24"),
        ((1, 1), (engine.native.most_width + 4, 16), "linear_key_"),
    ):
        layer = Layer(cpu, heads, *sizes)
        with pytest.raises(UserError, match=message):
            layer.run(layer.rows(1), (1, -1, 0, 0, 0))
