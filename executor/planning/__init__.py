"""Predicts without a run: the memory of a rank, the time of a step, and the settings that follow."""
