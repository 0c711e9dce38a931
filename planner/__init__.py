"""Predicts how a cluster serves a model: every layout of a model over its devices, with the time of its steps."""
