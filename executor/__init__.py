"""Runs a model: configuration, platforms, ranks, loading, requests, generation and its report."""
