"""Experts that live on the CPU."""
