"""Razor layers of the blocks and layers of each library."""
