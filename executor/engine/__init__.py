"""Runs a model step by step: its requests, their schedule, KV pages, batches and sampled tokens."""
