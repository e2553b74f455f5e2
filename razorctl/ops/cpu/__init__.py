"""Fused kernels for CPUs, in C; the user's compiler builds them once per machine."""
