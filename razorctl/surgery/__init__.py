"""Puts into a model what a recipe asks for, and takes it out again."""
