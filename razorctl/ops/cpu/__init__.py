"""Fused kernels for CPUs, in C, which the user's compiler builds once for each machine."""
