"""Heads whose logits are not stored, and the output layers of a model."""
