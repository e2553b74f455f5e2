"""What every launch of a kernel asks of Triton's compiler, whose own defaults change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton

# a * b + c is rounded once, as by torch.addcmul in the PyTorch bodies, and by the C kernels.
OPTIONS = {"enable_fp_fusion": True}
# Of a multiprocessor, and the most of a thread; all cards since sm_70 have as many.
REGISTERS, MOST_REGISTERS = 2**16, 255
WARP = 32


def launchable(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that is launched, rather than called by others."""
    kernel = triton.jit(function)
    kernel.run = partial(kernel.run, **OPTIONS)
    return kernel


def all_registers(warps: int) -> int:
    """How many a thread may have if a multiprocessor runs one program of so many warps.

    To be given as the limit where ptxas would spill some without one, so that two programs fit.
    """
    return min(MOST_REGISTERS, REGISTERS // (WARP * warps))
