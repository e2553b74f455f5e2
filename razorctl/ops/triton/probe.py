"""The smallest kernel: if it does not run, no kernel of Triton does."""

import torch
import triton.language as tl

from razorctl.ops.triton.launch import launchable


@launchable
def probe_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)


def run() -> None:
    """Launches the kernel on the current CUDA device; raises Triton's errors."""
    probe_kernel[(1,)](torch.empty(32, device="cuda"), N=32, num_warps=1)
