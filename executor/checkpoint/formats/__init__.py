"""Checkpoint formats: where a matrix lies in the files, and how it is read."""
