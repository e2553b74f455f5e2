"""The CUDA kernel of the op with the same file name, in Triton; imported only where Triton runs."""
