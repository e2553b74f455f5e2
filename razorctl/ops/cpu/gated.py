"""Kernel of ops.gated."""

import torch
from torch import Tensor

from razorctl.ops import gated as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import call, readable
from razorctl.ops.functions import NUMBERS


def takes(dy: Tensor, gate: Tensor, up: Tensor, function: str) -> bool:
    """Whether the kernel takes these arguments; in 16 bits, PyTorch's operations are faster."""
    single = dy.dtype == gate.dtype == up.dtype == torch.float32
    return single and readable(dy, gate, up)


@kernels.register(op.gated_grad, "cpu", takes)
def gated_grad(dy: Tensor, gate: Tensor, up: Tensor, function: str) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty_like(dy, memory_format=torch.contiguous_format) for _ in range(2))
    call(
        "gated_grad", dy=dy, gate=gate, up=up, dy_stride=dy.stride(0),
        gate_stride=gate.stride(0), up_stride=up.stride(0), rows=len(dy), columns=dy.shape[1],
        function=NUMBERS[function], dgate=dgate, dup=dup,
    )  # fmt: skip
    return dgate, dup
