"""Holds the planner and its simulation against measurements."""
