"""Draws the columns of activations, and the parameter blocks, that get a gradient."""
