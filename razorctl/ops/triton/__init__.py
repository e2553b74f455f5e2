"""The CUDA kernels of the ops of the files with the same names; imported only where Triton runs.

Names within kernels: `row` [R] and `column` [C] are numbers of elements; `at` are offsets from
where a tensor begins, `src` the pointers that are loaded from and `to` those that are stored to;
`inside` says which elements of a block there are, `there` which of its columns. A program has R
rows and C columns, or U columns of each strip; a thread loads V columns at once. `stride`: from one
row to the next, in elements. Upper case names are constants that a kernel is compiled for.
"""
