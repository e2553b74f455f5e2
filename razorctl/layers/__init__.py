"""Layers that keep the forward pass exact and save by a rule: a file a kind."""
