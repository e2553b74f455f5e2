"""Runs side by side: a grid of them is trained, compared, and one is advised."""
