"""Chooses the drafts of speculative decoding and whether they pay."""
