"""Tensors in, tensors out: each file says its ops once, as bodies made of PyTorch operations.

Kernels of an op lie in the files of the same name in `cpu` and `triton`.
"""
