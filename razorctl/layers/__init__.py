"""Layers with an exact forward pass that keep by a rule: one file for each kind of layer."""
