"""Mistakes that implementations of attention over latents, and of experts in groups, have made."""

import pytest

from tests.models.family_mistakes import Mistake, routing, without_experts_that_all_take, yarn_with
from tests.models.hybrid_mistakes import rewritten
from umbra.models.layers.latent_attention import LatentAttention
from umbra.models.rope import RopeConfig
from umbra.ops import composed, reference
from umbra.ops.cpu import ops as cpu


def choice(change: tuple[str, str]) -> Mistake:
    def mistake(patch: pytest.MonkeyPatch) -> None:
        rewritten(reference, "_routed", change)(patch)
        patch.setattr(cpu, "route_softmax", reference.route_softmax)
        patch.setattr(cpu, "route_sigmoid", reference.route_sigmoid)

    return mistake


def write(change: tuple[str, str]) -> Mistake:
    return rewritten(composed, "rope_write_latents", change)


def eps_of_other_norms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("umbra.models.layers.latent_attention.LATENT_EPS", 0.3)


def scores_not_scaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RopeConfig, "softmax_factor", 1.0)


BEST = "min(groups.best, each.shape[-1])"
HALVES = rewritten(LatentAttention, "__init__", ("pairs_of(turning)", "tuple(range(turning))"))
LATENT_MISTAKES: list[tuple[str, str, Mistake]] = [
    ("deepseek_v3", "tiny", choice((BEST, "1"))),
    ("deepseek_v3", "tiny", choice(('float("-inf")', "0.0"))),
    ("deepseek_v3", "tiny", choice((") * scale, ids", "), ids"))),
    ("deepseek_v2", "tiny", choice((BEST, "2"))),
    ("deepseek_v2", "tiny", choice((") * scale, ids", "), ids"))),
    (
        "deepseek_v3",
        "as_moonlight",
        routing(lambda x, bias, k, again, scale: reference.route_sigmoid(x, bias.bfloat16(), k, again, scale)),
    ),
    ("deepseek_v3", "tiny", scores_not_scaled),
    ("deepseek_v2", "as_lite", scores_not_scaled),
    ("deepseek_v3", "tiny", yarn_with(attention_factor=1.0)),
    ("deepseek_v3", "tiny", eps_of_other_norms),
    ("deepseek_v3", "tiny", HALVES),
    ("glm4_moe_lite", "tiny", HALVES),
    ("deepseek_v3", "tiny", write(("keys[:, None]", "ops.rms_norm(keys, norm.cos[0] * 0 + 1, 1e-6)[:, None]"))),
    ("deepseek_v3", "tiny", write(("ops.rms_norm(latents, norm.weight, norm.eps)", "latents"))),
    ("deepseek_v3", "tiny", without_experts_that_all_take),
]
