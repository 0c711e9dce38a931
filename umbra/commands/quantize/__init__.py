"""Quantises a checkpoint: to 4 bits (AWQ) or to FP8 in blocks."""
