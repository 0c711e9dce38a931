"""Runs a model: its case, its checkpoint, a platform, an engine; and starts the ranks that do it."""
