"""What a recipe puts into a model, and takes out again."""
