"""Predicts without running: memory of a rank, milliseconds of a step, and the settings that follow."""
