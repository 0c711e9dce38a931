"""What a step with shadow experts costs: measured, predicted, and what to choose by it."""
