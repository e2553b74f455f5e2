"""Gradients and int8 operands made from few-bit codes of an activation function's input."""

import pytest
import torch

from razorctl.ops.activation import (
    FUNCTIONS,
    activation_grad,
    activation_grad_reference,
    activation_to_int8,
    activation_to_int8_reference,
)
from razorctl.ops.int8 import to_int8
from razorctl.ops.quantize import BITS, codes, dequantize, quantize, scales

every_function = pytest.mark.parametrize("function", FUNCTIONS)


def coded(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed, zero, step = quantize(x, bits)
    return codes(packed, list(x.shape), bits), *scales(zero, step)


@every_function
def test_backward_is_the_derivative_of_forward(function):
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(50, dtype=torch.float64)
    (want,) = torch.autograd.grad(FUNCTIONS[function].forward(x), x, dy)
    torch.testing.assert_close(FUNCTIONS[function].backward(dy, x.detach()), want)


@every_function
@pytest.mark.parametrize("shape", [(1, 50, 7), (9, 5, 3), (2, 40, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradient_in_parts(shape, dtype, function, device, monkeypatch):
    of_x = coded(3 * torch.randn(shape, device=device), 4)
    dy = torch.randn(shape, device=device).to(dtype)
    want = activation_grad_reference(dy, *of_x, function)
    for name in ("ELEMENTS", "CACHED"):
        monkeypatch.setattr(f"razorctl.ops.chunks.{name}", 30)
    got = activation_grad(dy, *of_x, function)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)
    strided = dy.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(activation_grad(strided, *of_x, function), want)


@every_function
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 50, 7), (9, 5, 3), (2, 40, 11)])
def test_int8_operand(shape, bits, function, device, monkeypatch):
    number, offset, step = coded(3 * torch.randn(shape, device=device), bits)
    want, want_scale = activation_to_int8_reference(number, bits, offset, step, function)
    for name in ("ELEMENTS", "CACHED"):
        monkeypatch.setattr(f"razorctl.ops.chunks.{name}", 30)
    got, scale = activation_to_int8(number, bits, offset, step, function)
    torch.testing.assert_close(scale, want_scale)
    assert (got.int() - want.int()).abs().max() <= 1  # an ulp may decide which way it rounds
    # Both ends of a tile are there, and so is the largest output, but for the dip below zero.
    exact = FUNCTIONS[function].forward(dequantize(number, offset, step, torch.float32))
    exact = exact.flatten(0, 1)
    assert (scale * got - exact).abs().le(0.51 * scale + 1e-6).all()
    assert scale.ge(to_int8(exact, 0)[1] * (1 - 1e-6)).all()
    assert scale.sub(to_int8(exact, 0)[1]).max() <= 0.3 / 127


@every_function
def test_degenerate_inputs(function, device):
    for value in (0.0, 1e30, -1e30, 1e-30):
        of_x = coded(torch.full((2, 6, 3), value, device=device), 4)
        got, scale = activation_to_int8(of_x[0], 4, *of_x[1:], function)
        assert scale.isfinite().all()
        want = max(0.0, value)
        torch.testing.assert_close(
            scale * got, torch.full_like(scale * got, want), atol=1e-6, rtol=1e-2
        )
        dx = activation_grad(torch.ones(2, 6, 3, device=device), *of_x, function)
        assert dx.isfinite().all() or (function == "gelu-tanh" and abs(value) > 1e12)
    nothing = torch.empty(2, 0, 3, device=device)
    of_x = coded(nothing, 4)
    assert activation_grad(nothing, *of_x, function).shape == (2, 0, 3)
    assert activation_to_int8(of_x[0], 4, *of_x[1:], function)[0].shape == (0, 3)


def test_registration():
    x = torch.randn(2, 9, 5)
    of_x = coded(x, 4)
    torch.library.opcheck(activation_grad, (x, *of_x, "gelu"))
    torch.library.opcheck(activation_to_int8, (of_x[0], 4, *of_x[1:], "silu"))
