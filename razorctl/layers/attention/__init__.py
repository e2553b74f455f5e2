"""Attention: what it stores, its fused kernels, and the attention classes of each library."""
