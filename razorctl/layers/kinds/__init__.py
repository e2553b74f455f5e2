"""Razor classes for torch's kinds of layers."""
