"""Razor layers of torch's kinds of layers."""
