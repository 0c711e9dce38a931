"""Tests of the ops on a GPU that need none."""
