"""Requests, the sequences that they become, and the scheduler, which decides what the next step computes."""
