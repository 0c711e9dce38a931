"""Mistakes that implementations of attention over latents, and of experts in groups, have made."""

import pytest

from tests.models.family_mistakes import Mistake, bias_in_bfloat16, routing, without_experts_that_all_take, yarn_with
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


BEST = "min(groups.best, by_group.shape[-1])"
HALVES = rewritten(LatentAttention, "__init__", ("pairs_of(turning)", "tuple(range(turning))"))
DEEPSEEK_V3: dict[str, Mistake] = {"groups_by_their_best": choice((BEST, "1"))}
DEEPSEEK_V3 |= {"others_are_zero": choice(('float("-inf")', "0.0")), "not_scaled": choice((") * scale, ids", "), ids"))}
DEEPSEEK_V3 |= {"bias_in_bfloat16 as_moonlight": routing(bias_in_bfloat16), "scores_not_scaled": scores_not_scaled}
DEEPSEEK_V3 |= {"yarn_without_attention_factor": yarn_with(attention_factor=1.0)}
DEEPSEEK_V3 |= {"eps_of_other_norms": eps_of_other_norms, "halves_rotate": HALVES}
DEEPSEEK_V3 |= {"keys_normalised": write(("keys[:, None]", "ops.rms_norm(keys, norm.cos[0] * 0 + 1, 1e-6)[:, None]"))}
DEEPSEEK_V3 |= {"latents_not_normalised": write(("ops.rms_norm(latents, norm.weight, norm.eps)", "latents"))}
DEEPSEEK_V3 |= {"without_shared_experts": without_experts_that_all_take}
DEEPSEEK_V2: dict[str, Mistake] = {
    "groups_by_their_sum": choice((BEST, "2")),
    "not_scaled": choice((") * scale, ids", "), ids")),
    "scores_not_scaled as_lite": scores_not_scaled,
}
GLM4_MOE_LITE: dict[str, Mistake] = {"halves_rotate": HALVES}
