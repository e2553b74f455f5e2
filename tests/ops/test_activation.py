"""Activation functions, and their gradient from a few-bit copy of their input."""

import pytest
import torch

from razorctl.ops.activation import activation_grad, activation_quantize
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.quantize import quantize
from tests import references
from tests.references import copied

every_function = pytest.mark.parametrize("function", FUNCTIONS)
JUMPING = ("hardswish", "relu", "relu6", "leaky-relu")  # whose derivative does


@every_function
def test_backward_is_the_derivative_of_forward(function):
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(50, dtype=torch.float64)
    (want,) = torch.autograd.grad(FUNCTIONS[function].forward(x), x, dy)
    torch.testing.assert_close(FUNCTIONS[function].backward(dy, x.detach()), want)


@every_function
def test_reach_is_the_largest_output(function, device):
    x = torch.linspace(-6, 6, 100_001, dtype=torch.float64, device=device)
    y = FUNCTIONS[function].forward(x)
    lowest = x.new_tensor(FUNCTIONS[function].lowest).clamp(-6, 6)
    torch.testing.assert_close(FUNCTIONS[function].forward(lowest), y.min(), atol=1e-6, rtol=0)
    ends = torch.tensor([[-5.0, 3.0], [-3.0, -1.5], [-1.0, -0.5], [-0.3, 0.1], [0.2, 0.4]])
    low, high = ends.double().to(device).T
    want = [y[(x >= a) & (x <= b)].abs().max() for a, b in zip(low, high, strict=True)]
    torch.testing.assert_close(
        FUNCTIONS[function].reach(low, high), torch.stack(want), rtol=1e-3, atol=0
    )


@every_function
@pytest.mark.parametrize(
    ("shape", "tile_rows", "dtype"),
    [((50, 7), 50, torch.bfloat16), ((70, 64), 40, torch.float32)],
)
def test_gradient_in_parts(shape, tile_rows, dtype, function, device, monkeypatch):
    copy = copied(3 * torch.randn(shape, device=device), 4, tile_rows)
    dy = torch.randn(shape, device=device).to(dtype)
    want = references.activation_grad(dy, copy, function)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    got = activation_grad(dy, copy, function)
    assert got.dtype == dtype
    # torch also rounds 1.702 x to bfloat16.
    near = {"atol": 2e-3, "rtol": 1.6e-2} if dtype == torch.bfloat16 else {"atol": 1e-5}
    far = ~torch.isclose(got, want, **near)
    # Where the derivative jumps, rounding decides which side an element is on.
    assert far.float().mean() <= (0.002 if function in JUMPING else 0)
    strided = dy.t().contiguous().t()
    torch.testing.assert_close(activation_grad(strided, copy, function), want)


@every_function
def test_degenerate_inputs(function, device):
    for value in (0.0, 1e30, -1e30, 1e-30):
        copy = copied(torch.full((12, 3), value, device=device), 4, 6)
        dx = activation_grad(torch.ones(12, 3, device=device), copy, function)
        assert dx.isfinite().all() or (function == "gelu-tanh" and abs(value) > 1e12)
    nothing = torch.empty(0, 3, device=device)
    assert activation_grad(nothing, copied(nothing, 4, 6), function).shape == (0, 3)


@every_function
def test_output_and_copy(function, device):
    x = torch.randn(3, 5, 7, device=device)
    y, *copy = activation_quantize(x, function, 4, 6)
    torch.testing.assert_close(y, FUNCTIONS[function].forward(x))
    for got, want in zip(copy, quantize(x.flatten(0, 1), 4, 6), strict=True):
        assert torch.equal(got, want)
