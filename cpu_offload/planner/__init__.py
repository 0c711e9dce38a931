"""The cost of a step with shadow experts, measured and predicted, and the settings chosen from it."""
