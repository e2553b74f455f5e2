import pytest
import torch

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gated import gated_grad


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import gated

    return interpreted(gated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gated_grad(function, dtype, kernels):
    dy, gate, up = 3 * torch.randn(3, 70, 33)  # a block, and a part of one
    gate = gate.to(dtype)
    gate.masked_fill_(gate.abs() == 3, 2.0)  # a hard swish has no slope at its corners
    args = dy.to(dtype), gate, up.to(dtype)
    want = gated_grad.body(*(t.float() for t in args), function)
    got = kernels.gated_grad(*args, function)
    torch.testing.assert_close(got, tuple(t.to(dtype) for t in want), rtol=8e-3, atol=1e-5)


def test_it_takes_what_is_contiguous(kernels):
    x = torch.randn(4, 6)
    assert kernels.takes(x, x, x, "silu")
    assert not kernels.takes(x, x.t().contiguous().t(), x, "silu")
    assert not kernels.takes(x, x.double(), x, "silu")
