"""Traced and measured bytes, and costs of operations."""
