"""Models that are named by their names on a hub, and fetched from there."""
