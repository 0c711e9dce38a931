"""Runs a model step by step: requests, scheduling, pages, batches, sampling."""
