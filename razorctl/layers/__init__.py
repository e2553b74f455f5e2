"""Layers with the stock forward pass that store packed copies for the backward pass."""
