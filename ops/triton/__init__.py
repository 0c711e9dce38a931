"""Triton kernels: one source for triton-ascend, CUDA Triton and, with TRITON_INTERPRET=1, the CPU; needs `triton`."""

PROGRAMS = 48  # the most that a launch has: the vector cores of a die. Each takes every 48th row or block.
