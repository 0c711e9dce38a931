"""Checkpoint formats: which tensors store a matrix, and how parts of it are read from them."""
