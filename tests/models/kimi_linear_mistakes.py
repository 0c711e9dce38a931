"""Mistakes that implementations of Kimi-Linear have made or could make."""

import pytest

from tests.models.family_mistakes import (
    Mistake,
    bias_in_bfloat16,
    routing,
    weights_with_bias,
    without_experts_that_all_take,
)
from tests.models.hybrid_mistakes import NORMED, RULE, op, rewritten, rule
from tests.models.latent_mistakes import eps_of_other_norms, write
from umbra.models.layers.delta_net import ChannelDeltaNet
from umbra.models.layers.latent_attention import LatentAttention
from umbra.models.rope import RopeConfig
from umbra.ops import reference


def shared_keys_rotate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("umbra.models.kimi_linear.config.RopeConfig", lambda theta, dim, yarn: RopeConfig(theta, 8, yarn))


def mixer(*changes: tuple[str, str]) -> Mistake:
    return rewritten(ChannelDeltaNet, "__init__", *changes)


SCORES = rewritten(LatentAttention, "__init__", ("(still + turning) ** -0.5", "still**-0.5"))
MISTAKES: dict[str, Mistake] = {
    "decays_of_heads": rule(("decays.view(heads, -1, 1)", "decays.view(heads, -1, 1)[:, :1]")),
    "shared_keys_rotate": shared_keys_rotate,
    **{name: mistake for name, mistake in RULE.items() if name != "eps_outside"},  # no key is so small
    "rates_in_turn": rule(("rates.repeat_interleave(", "rates.repeat(")),
    "decays_with_a_bound": mixer(("build.parallel, width, lowest", "build.parallel, width, -5.0")),
    "silu_of_the_gate": op("gated_rms_norm", ("gate.float().sigmoid() if sigmoid else ", "")),
    "gate_before_norm": op("gated_rms_norm", NORMED),
    "convolutions_in_another_order": mixer(('[rows] for which in "qkv"', '[rows] for which in "kqv"')),
    "keys_before_queries": mixer(('*rows) for which in "qkv"', '*rows) for which in "kqv"')),
    "one_added_to_the_gated_norm": mixer(("base=0.0", "base=1.0")),
    "scores_scaled_by_fewer_columns": SCORES,
    "eps_of_other_norms": eps_of_other_norms,
    "latents_not_normalised": write(("ops.rms_norm(latents, norm.weight, norm.eps)", "latents")),
    "not_scaled": routing(lambda x, bias, k, again, _: reference.route_sigmoid(x, bias, k, again)),
    "no_bias": routing(lambda x, _, k, again, scale: reference.route_sigmoid(x, None, k, again, scale)),
    "weights_with_bias": routing(weights_with_bias),
    "bias_in_bfloat16": routing(bias_in_bfloat16),
    "renormalised sparse": routing(lambda x, bias, k, _, scale: reference.route_sigmoid(x, bias, k, True, scale)),
    "without_shared_experts": without_experts_that_all_take,
}
