"""What every launch of a kernel asks of Triton's compiler, whose own defaults change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton

# a * b + c is rounded once, as by torch.addcmul in the PyTorch bodies, and by the C kernels.
OPTIONS = {"enable_fp_fusion": True}


def launchable(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that is launched, rather than called by others."""
    kernel = triton.jit(function)
    kernel.run = partial(kernel.run, **OPTIONS)
    return kernel
