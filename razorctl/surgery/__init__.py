"""Changes a model as a recipe asks, and restores it."""
