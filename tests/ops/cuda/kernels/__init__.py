"""Triton's kernels without a GPU: in its interpreter, and by its compiler."""
