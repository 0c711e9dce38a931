"""The cases of each stage."""
