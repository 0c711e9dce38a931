"""Simulates hours of serving on a cluster: the real scheduler, pages and prefixes, with step times from the model."""
