"""Hit rates of residents: the share of (token, expert) pairs whose expert is on the device, by the share of the experts
that is.

A curve runs straight between its points, from (0, 0) to (1, 1). Those of other engines and models are what was
published: policies, texts and lengths differ, so a plan names the curve that it assumes.
"""

from itertools import pairwise

from umbra.base.errors import UserError

Curve = tuple[tuple[float, float], ...]
CURVES: dict[str, Curve] = {
    "even": (),  # all experts are used equally often
    # DeepSeek-V4-Flash, chosen by a prompt's counts and then frozen: cann-recipes-infer, at 16k (26 to 31 % elsewhere)
    "v4_flash_frozen": ((0.125, 0.262),),
    "glm_5_3_frozen": ((0.111, 0.34),),  # GLM-5.3-Flash, the same
    # V4-Flash, residents that move: LRU on MMLU (54.2 % with LFU on Alpaca), sglang 35314; 42 to 48 %: club-3090 861
    "v4_flash_moved": ((0.15, 0.464), (0.45, 0.81)),
    # LRU, colibri 119
    "glm_5_2_moved": ((0.05, 0.24), (0.074, 0.40), (0.098, 0.46), (0.123, 0.51), (0.184, 0.60)),
    # Qwen3.8-Flash-Next, 10 of 512 experts: LRU, imp 2061
    "qwen3_8_moved": ((0.18, 0.435), (0.36, 0.62), (0.54, 0.72), (0.73, 0.79)),
}


def curve_of(text: str, where: str) -> Curve:
    """The curve that a key has as its value: a name of CURVES, or its own points, SHARE:RATE,..."""
    if text in CURVES:
        return CURVES[text]
    try:
        points = tuple((float(share), float(rate)) for share, rate in (point.split(":") for point in text.split(",")))
    except ValueError:
        points = ()
    ends = ((0.0, 0.0), *points, (1.0, 1.0))
    if not points or not all(low < high and least <= most for (low, least), (high, most) in pairwise(ends)):
        raise UserError(
            f"{where}: {text!r:.80} is not one of {', '.join(CURVES)}, nor SHARE:RATE,... with shares that "
            "grow from 0 to 1, and rates that do not fall"
        )
    return points


def hit_rate(curve: Curve, resident: float) -> float:
    """The hit rate if the share `resident` of the experts is on the device."""
    points = ((0.0, 0.0), *curve, (1.0, 1.0))
    (low, least), (high, most) = next(pair for pair in pairwise(points) if resident <= pair[1][0])
    return least + (most - least) * (resident - low) / (high - low)
