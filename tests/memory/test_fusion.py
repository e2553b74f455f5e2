"""The kernels of a compiled step, from the operations of one that is not."""

import torch
import torch.nn.functional as F
from torch import nn

from razorctl.memory.trace_cache import FUSED
from razorctl.memory.tracker import trace_step

ROWS, WIDTH = 64, 32
SIZE = 4 * ROWS * WIDTH  # bytes of an activation


def fused(model: nn.Module, run=None) -> list[tuple[int, int]]:
    """The bytes of each kernel of fused operations in a forward and backward pass, and again."""
    x = torch.zeros(ROWS, WIDTH)

    def step(model, batches, optimizer):
        for batch in batches:
            (run or model)(batch)

    trace = trace_step(model, x, None, step, lambda model, x: model(x), 1)
    assert sum(n for k, n in trace.compiled.items() if k.op != FUSED) == sum(
        n for k, n in trace.kernels.items() if k.operations
    )
    kernels = (k for k, n in trace.compiled.items() for _ in range(n) if k.op == FUSED)
    return [(kernel.bytes, kernel.written) for kernel in kernels]


def test_between_two_products_each_tensor_is_read_and_written_once():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

        def forward(self, x):
            y = self.first(x)
            return self.second(F.gelu(y.relu() + 1) * y)

    with torch.no_grad():
        assert fused(Chain()) == [(2 * SIZE, 0)]


def test_what_nothing_reads_is_not_written_and_sums_may_be_read_again():
    class Sums(nn.Module):
        def forward(self, x):
            return (x + 1).sum(0)

    assert fused(Sums().requires_grad_(False)) == [(SIZE, SIZE + SIZE // ROWS)]
