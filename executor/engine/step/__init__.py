"""Runs the model step by step: weights, batches, sampled tokens, and the loop around them."""
