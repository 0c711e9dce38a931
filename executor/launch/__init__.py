"""Starts the ranks of a case, on one machine or several, and ends them all when one fails."""
