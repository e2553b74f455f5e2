"""Kernel of ops.gated: dgate = f'(gate) up dy and dup = f(gate) dy, all of n elements."""

from collections.abc import Iterator

import triton.language as tl
from torch import Tensor

from razorctl.ops import gated as op
from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.numbers import activated, slope
from razorctl.ops.triton.variants import KNOWN, Variant, dtypes

BLOCK, WARPS = 2048, 4  # elements and warps of a program


@launchable
def gated_grad_kernel(
    dy, gate, up, dgate, dup, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program computes BLOCK elements of both gradients."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    of_gate = gradient * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dgate + at, (of_gate * slope(x, FUNCTION)).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (gradient * activated(x, FUNCTION)).to(dup.dtype.element_ty), mask=inside)


def takes(dy: Tensor, gate: Tensor, up: Tensor, function: str) -> bool:
    """Whether the kernel takes these arguments."""
    dense = dy.is_contiguous() and gate.is_contiguous() and up.is_contiguous()
    return dense and dy.numel() > 0 and dy.dtype == gate.dtype == up.dtype and dy.dtype in KNOWN


@kernels.register(op.gated_grad, "cuda", takes)
def gated_grad(dy: Tensor, gate: Tensor, up: Tensor, function: str) -> tuple[Tensor, Tensor]:
    dgate, dup, n = dy.new_empty(dy.shape), dy.new_empty(dy.shape), dy.numel()
    gated_grad_kernel[(cdiv(n, BLOCK),)](
        dy, gate, up, dgate, dup, n,
        FUNCTION=function, BLOCK=BLOCK, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return dgate, dup


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    names = "dy", "gate", "up", "dgate", "dup"
    for dtype in dtypes(capability, every):
        for function in FUNCTIONS if every else ("silu",):
            yield Variant(
                gated_grad_kernel, {**dict.fromkeys(names, f"*{dtype}"), "n": "i32"},
                {"FUNCTION": function, "BLOCK": BLOCK}, WARPS, 1, f"gated_grad {function} {dtype}",
            )  # fmt: skip
