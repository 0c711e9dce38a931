"""Mistakes that implementations of gated DeltaNet and its families have made, as other texts of Umbra's functions."""

import inspect
import textwrap
from typing import Any

import pytest

from tests.models.family_mistakes import Mistake, without_a_gate
from umbra.models.layers import rotary
from umbra.models.layers.attention import GroupedAttention
from umbra.models.layers.delta_net import Decay, DeltaNet
from umbra.models.layers.norm import RMSNorm
from umbra.models.rope import RopeConfig
from umbra.ops import recurrent, reference
from umbra.ops.cpu import ops as cpu


def rewritten(owner: Any, name: str, *changes: tuple[str, str], into: Any = None) -> Mistake:
    """`owner.name`, or that of `into`, with the text of `owner.name` in which each of `changes` was made."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        own = getattr(owner, name)
        text = textwrap.dedent(inspect.getsource(own)).replace("super().__init__()", "nn.Module.__init__(self)")
        for old, new in changes:
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        names = dict(own.__globals__)
        exec(text, names)  # noqa: S102 (of our own text)
        patch.setattr(into or owner, name, names[name])

    return mistake


def op(name: str, *changes: tuple[str, str], of: Any = reference) -> Mistake:
    return rewritten(of, name, *changes, into=cpu)


def rule(*changes: tuple[str, str]) -> Mistake:
    return op("gated_delta_rule", *changes, of=recurrent)


def conv(*changes: tuple[str, str]) -> Mistake:
    return op("causal_conv", *changes, of=recurrent)


def key_heads_in_turn(patch: pytest.MonkeyPatch) -> None:
    change = ".repeat_interleave(heads * depth // len(x), 0)", ".repeat(heads * depth // len(x), 1)"
    rewritten(recurrent, "_of_heads", change)(patch)
    patch.setattr(cpu, "gated_delta_rule", recurrent.gated_delta_rule)


def whole_heads_rotate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("umbra.models.hybrid_config.read_rotary_dim", lambda hf, dim, default: dim)


FADE = "            state = state * decays.view(heads, -1, 1)\n"
ADD = "state = state + key[:, :, None] * change[:, None]"
NORMED = "rms_norm(x, weight, eps).float() * open", "rms_norm(x * open, weight, eps)"
SQUARES, OUT = "torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)", 'torch.einsum("hkv,hk->hv", state, query)'
LAST = "inputs[len(inputs) - taps + 1 :]"
RULE = {  # of every layer with a convolution and a delta rule
    "means_for_sums": rule((".sum(-1, keepdim=True)", ".mean(-1, keepdim=True)")),
    "eps_outside": rule((SQUARES, "1 / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6)")),
    "no_l2norm": rule((f"x * {SQUARES}", "x")),
    "queries_not_scaled": rule((" * depth**-0.5", "")),
    "no_dt_bias": rule((" + dt_bias", "")),
    "no_softplus": rule(("F.softplus(passed)", "passed.relu()")),
    "sign_of_the_logarithm": rewritten(Decay, "pieces", ("logarithms.float().exp()", "(-logarithms.float()).exp()")),
    "decay_after_the_update": rule((FADE, ""), (ADD, f"{ADD}; state = state * decays.view(heads, -1, 1)")),
    "output_of_the_old_state": rule((FADE, f"            old = state\n{FADE}"), (OUT, OUT.replace("state", "old"))),
    "no_silu_after_the_convolution": conv(("F.silu", "")),
    "convolution_backwards": conv(("weight.T", "weight.flip(0).T")),
    "state_of_outputs": conv((LAST, "torch.cat((before, out[s.start : s.end]))[1 - taps :]")),
    "state_of_this_step_alone": conv((LAST, "torch.cat((torch.zeros_like(before), x[s.start : s.end]))[1 - taps :]")),
}
DENSE = RULE | {
    "norms_without_one": rewritten(RMSNorm, "pieces", (" + self.base)", ")")),
    "one_added_twice": rewritten(RMSNorm, "pieces", (" + self.base)", " + 2 * self.base)")),
    "one_added_to_the_gated_norm": rewritten(DeltaNet, "__init__", ("base=0.0", "base=1.0")),
    "gate_before_norm": op("gated_rms_norm", NORMED),
    "sigmoid_of_the_gate": op("gated_rms_norm", ("F.silu(gate", "torch.sigmoid(gate")),
    "no_output_gate": op("sigmoid_mul", (" * gate.float().sigmoid()", "")),
    "output_gate_of_whole_parts": rewritten(GroupedAttention, "__init__", ("heads if gated else 1", "1")),
    "key_heads_in_turn": key_heads_in_turn,
    "b_and_a_swapped": rewritten(DeltaNet, "forward", ("(b, a)", "(a, b)")),
    "whole_heads_rotate": whole_heads_rotate,
    "adjacent_pairs": rewritten(
        rotary,
        "head_order",
        ("turning[:half]", "turning[::2]"),
        ("turning[half:]", "turning[1::2]"),
        into=inspect.getmodule(GroupedAttention),
    ),
    "frequencies_of_whole_heads": rewritten(
        RopeConfig,
        "inverse_frequencies",
        ("self.plain_frequencies", "[self.theta ** (-2 * i / 32) for i in range(self.dim // 2)]"),
    ),
}
BOTH = DENSE | {
    "state_in_bfloat16": rule((ADD, f"{ADD}; state = state.bfloat16().float()")),
    "not_renormalised": op("route_softmax", ("top_k, renormalise, scale, groups)", "top_k, False, scale, groups)")),
    "shared_expert_not_gated": without_a_gate,
}
NEXT = {
    "groups_of_rows_read_flat": rewritten(DeltaNet, "__init__", ("values, values], key_heads)", "values, values])")),
    "groups_of_b_and_a_read_flat": rewritten(DeltaNet, "__init__", ("[heads, heads], key_heads)", "[heads, heads])")),
}
