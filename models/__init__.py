"""The models: layers that all model families share, and one folder for each family."""
