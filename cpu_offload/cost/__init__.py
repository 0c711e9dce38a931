"""What a step with shadow experts costs, measured and predicted, and the choices that follow."""
