"""Fused kernels for CPUs, in C, which the user's own compiler builds once for each machine."""
