"""CUDA kernels of the ops in the files of the same names; imported only where Triton runs.

Names within kernels: `row` [R] and `column` [C] are indices of elements; `at` are offsets from the
start of a tensor, `src` pointers to load from and `to` pointers to store to; `inside` is the mask
of a block, `there` the mask of its columns. A program has R rows and C columns, or U columns of
each strip; a thread loads V columns at once. `stride`: from one row to the next, in elements.
Upper case names are constants that a kernel is compiled for.
"""
