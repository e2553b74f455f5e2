"""Attention: what it stores, its fused kernels, and the attention of each library."""
