"""The commands of `umbra` that are more than one call."""
