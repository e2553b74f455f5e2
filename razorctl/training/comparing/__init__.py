"""Runs side by side: trains a grid of methods and seeds, compares runs, and recommends one."""
