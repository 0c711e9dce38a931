"""Counts the memory of a rank on Ascend."""
