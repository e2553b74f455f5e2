"""Functions from tensors to tensors. Each file defines ops, with bodies of PyTorch operations.

The kernels of an op are in the files of the same name in `cpu` and `triton`.
"""
