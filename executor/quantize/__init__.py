"""Quantises a checkpoint to 4 bits (AWQ)."""
