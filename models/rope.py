"""Settings of rotary position embedding: plain, or YaRN (arXiv 2309.00071) or Llama 3's, which extend the trained
length, or with a divisor for each frequency."""

import math
from dataclasses import dataclass

from umbra.base.errors import UserError, short
from umbra.models.hf_config import LARGEST, SMALLEST, HfConfig

BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class YarnConfig:
    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float  # scales cos and sin, and so the attention logits
    truncate: bool
    mscale_all_dim: float = 0.0  # of models whose softmax it scales; 0: none


@dataclass(frozen=True)
class Llama3Config:
    factor: float
    original_length: int
    low_freq_factor: float  # full rotations within the original length, of pairs that begin to be slow
    high_freq_factor: float  # of pairs that are fast


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    dim: int  # columns of a head that rotate, the first ones; the others stay as they are
    yarn: YarnConfig | None
    llama3: Llama3Config | None = None
    divisors: tuple[float, ...] = ()  # of the frequencies
    query_beta: float = 0.0  # how fast queries grow with the logarithm of their position, in YaRN's original lengths
    turning: int | None = None  # the first pairs, so many, that turn; the others have the angle zero. None: all

    @property
    def softmax_factor(self) -> float:
        """The factor by which `mscale_all_dim` scales attention's scores."""
        weight = self.yarn.mscale_all_dim if self.yarn else 0.0
        return _mscale(self.yarn.factor, weight) ** 2 if self.yarn and weight else 1.0

    @property
    def plain_frequencies(self) -> list[float]:
        """The angle per position of each of the dim / 2 pairs of columns, if nothing extends the trained length."""
        return [self.theta ** (-2 * i / self.dim) for i in range(self.dim // 2)]

    def inverse_frequencies(self) -> list[float]:
        """The angle per position of each of the dim / 2 pairs of columns."""
        plain = self.plain_frequencies
        if self.divisors:
            return [f / divisor for f, divisor in zip(plain, self.divisors, strict=True)]
        if own := self.llama3:
            low, width = own.low_freq_factor, own.high_freq_factor - own.low_freq_factor
            turns = (own.original_length * f / (2 * math.pi) for f in plain)
            fast = [min(max((n - low) / width, 0.0), 1.0) for n in turns]
            return [f * s + f / own.factor * (1 - s) for f, s in zip(plain, fast, strict=True)]
        if self.turning is not None:
            return plain[: self.turning] + [0.0] * (len(plain) - self.turning)
        if self.yarn is None:
            return plain
        yarn = self.yarn
        low, high = (self._pair_that_turns(turns, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = max(high - low, 0.001)
        # Fast pairs keep their frequency, slow pairs' is divided by `factor`, with a linear ramp between.
        stretched = [min(max((i - low) / width, 0.0), 1.0) for i in range(self.dim // 2)]
        return [f * (1 - s) + f / yarn.factor * s for f, s in zip(plain, stretched, strict=True)]

    def _pair_that_turns(self, turns: float, yarn: YarnConfig) -> float:
        """The (fractional) index of the pair that makes `turns` full rotations within the original length."""
        return self.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def read_rope(
    config: HfConfig, dim: int, max_positions: int, theta: float = 10000.0, kinds: tuple[str, ...] = ("default", "yarn")
) -> RopeConfig:
    """Reads `rope_theta`, by default `theta`, and `rope_scaling`, or `rope_parameters`, which configs of transformers 5
    have instead. `kinds`: the types of rotary embedding that the model may have."""
    keys = [key for key in ("rope_parameters", "rope_scaling") if config.value(key) is not None]
    if len(keys) > 1:
        raise config.error("rope_scaling", "and rope_parameters are both set: remove the one that is not meant")
    inner = config.inner(keys[0]) if keys else HfConfig({}, config.where)
    theta = inner.number("rope_theta", default=config.number("rope_theta", default=theta))
    kind = inner.value("rope_type", "type", default="default")
    if dim % 2:
        raise UserError(f"{config.where}: head_dim: {dim} must be even for rotary embedding")
    if kind not in kinds:
        raise UserError(f"{inner.where}: rope type {short(kind)} is not implemented, only {' and '.join(kinds)}")
    if kind == "default":
        return RopeConfig(theta, dim, None)
    if kind == "longrope":
        return RopeConfig(theta, dim, None, divisors=_divisors(inner, dim))
    if kind == "proportional":
        inner.refuse("factor", 1.0)
        share = inner.number("partial_rotary_factor", default=1.0)
        if share > 1:
            raise inner.error("partial_rotary_factor", "must be at most 1")
        return RopeConfig(theta, dim, None, turning=int(share * dim // 2))
    original = inner.size("original_max_position_embeddings", default=max_positions)
    factor = inner.number("factor", default=max_positions / original)
    if theta <= 1 or factor < 1:
        raise UserError(f"{inner.where}: {kind} needs rope_theta above 1 and factor of at least 1")
    if kind == "llama3":
        low, high = (inner.number(f"{name}_freq_factor", default=d) for name, d in (("low", 1.0), ("high", 4.0)))
        if low >= high:
            raise inner.error("low_freq_factor", f"must be below high_freq_factor: {high}")
        return RopeConfig(theta, dim, None, Llama3Config(factor, original, low, high))
    yarn = YarnConfig(
        factor=factor,
        original_length=original,
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        attention_factor=inner.number("attention_factor", default=_default_attention_factor(inner, factor)),
        truncate=inner.flag("truncate", True),
        mscale_all_dim=inner.number("mscale_all_dim", default=1.0) if inner.value("mscale_all_dim") else 0.0,
    )
    beta = inner.number(BETA, default=0.0) if inner.value(BETA) else 0.0
    return RopeConfig(theta, dim, yarn, query_beta=beta)


def read_rotary_dim(hf: HfConfig, head_dim: int, default: float = 1.0) -> int:
    """Number of a head's columns that rotate: `rotary_dim`, or `partial_rotary_factor` of the head, which transformers
    5 writes. With neither it is the share `default`; both must agree."""
    nested = hf.inner("rope_parameters") if hf.value("rope_parameters") is not None else hf
    holder = nested if nested.value("partial_rotary_factor") is not None else hf
    share = holder.number("partial_rotary_factor", default=default) * head_dim
    if share > head_dim or not math.isclose(share, round(share)):
        raise holder.error("partial_rotary_factor", f"of head_dim {head_dim} must be a whole number of columns")
    dim = hf.size("rotary_dim", default=round(share), maximum=head_dim)
    if holder.value("partial_rotary_factor") is not None and dim != round(share):
        raise hf.error("rotary_dim", f"does not agree with partial_rotary_factor: {share / head_dim:g} of {head_dim}")
    if dim % 2 or head_dim % 2:
        raise UserError(f"{hf.where}: rotary_dim: {dim} and head_dim: {head_dim} must be even")
    return dim


def _divisors(scaling: HfConfig, dim: int) -> tuple[float, ...]:
    """The divisors of `longrope`, which must be the same for texts of every length."""
    short, long = scaling.value("short_factor", default=[]), scaling.value("long_factor", default=[])
    known = isinstance(short, list) and len(short) == dim // 2
    if not known or not all(type(x) is float and SMALLEST <= x <= LARGEST for x in short):
        raise scaling.error("short_factor", f"must be a list of {dim // 2} positive numbers")
    if short != long or scaling.number("attention_factor", default=1.0) != 1:
        raise scaling.error("long_factor", "other than short_factor, or an attention_factor, is not implemented")
    return tuple(short)


def _default_attention_factor(scaling: HfConfig, factor: float) -> float:
    if scaling.value("mscale") and scaling.value("mscale_all_dim"):
        own, all_dim = (scaling.number(name, default=1.0) for name in ("mscale", "mscale_all_dim"))
        return _mscale(factor, own) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
