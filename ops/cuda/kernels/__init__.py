"""Triton's kernels, each with the name and the meaning of an op of ops/reference.py. Each file begins with what a
program of its kernel computes."""

from umbra.ops.cuda.kernels.experts import mixture
from umbra.ops.cuda.kernels.paged import attention, latent_attention
from umbra.ops.cuda.kernels.recurrent import causal_conv, gated_delta_rule
from umbra.ops.cuda.kernels.rows import add_rms_norm, norm_rope_write, rms_norm, route_sigmoid, route_softmax, silu_mul
from umbra.ops.cuda.kernels.unpack import unpack

__all__ = [
    "add_rms_norm",
    "attention",
    "causal_conv",
    "gated_delta_rule",
    "latent_attention",
    "mixture",
    "norm_rope_write",
    "rms_norm",
    "route_sigmoid",
    "route_softmax",
    "silu_mul",
    "unpack",
]
