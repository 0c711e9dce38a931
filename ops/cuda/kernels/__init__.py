"""Triton's kernels, each with the name and the meaning of an op of ops/reference.py. Each file begins with what a
program of its kernel computes."""
