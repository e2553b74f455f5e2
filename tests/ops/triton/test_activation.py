import pytest
import torch

from razorctl.ops.functions import FUNCTIONS
from tests import references
from tests.ops.triton.test_int8 import alike as alike_int8
from tests.ops.triton.test_quantize import TYPES, activation, alike

every_function = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import activation

    return interpreted(activation)


@every_function
def test_activation_grad(function, kernels):
    dy = torch.randn(70, 200)[:, :192]
    copy = references.quantize(3 * torch.randn(70, 192), 5, 40)
    want = references.activation_grad(dy, copy, function)
    torch.testing.assert_close(kernels.activation_grad(dy, copy, function), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_grad_half(dtype, kernels):
    dy, copy = torch.randn(33, 64).to(dtype), references.quantize(torch.randn(33, 64), 4, 40)
    want = references.activation_grad(dy.float(), copy, "gelu")
    got = kernels.activation_grad(dy, copy, "gelu")
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-4)


@every_function
def test_activation_grad_int8(function, kernels, monkeypatch):
    dy, copy = torch.randn(26, 200)[:, :192], references.quantize(3 * torch.randn(26, 192), 5, 16)
    want = references.activation_grad(dy, copy, function)
    for widest in (192, 191):  # in one kernel, and in two
        monkeypatch.setattr(kernels, "WIDEST", widest)
        codes, *others = kernels.activation_grad_int8(dy, copy, function)
        wanted = references.int8_rows(want)
        alike_int8(codes, wanted[0])
        # The slope of GELU is off by 1.2e-5; dy is at most 4, and there are 26 rows.
        atol = 2e-4 if function == "gelu" else 1e-5
        torch.testing.assert_close(others, list(wanted[1:]), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", TYPES)
def test_activation_grad_int8_is_that_of_dx_in_its_dtype(dtype, kernels):
    dy, copy = torch.randn(33, 64).to(dtype), references.quantize(torch.randn(33, 64), 4, 33)
    dy[1], dy[2, 3] = 0, float("nan")
    codes, scale, *of_columns = kernels.activation_grad_int8(dy, copy, "silu")
    want = kernels.activation_grad(dy, copy, "silu")
    wanted = references.int8_rows(want)
    finite = dy.isfinite().all(1)
    alike_int8(codes[finite], wanted[0][finite])
    torch.testing.assert_close(scale, wanted[1], rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(of_columns, list(wanted[2:]), rtol=1e-5, atol=1e-5, equal_nan=True)


@every_function
@pytest.mark.parametrize("tile_rows", [8, 300])
def test_activation_quantize(function, tile_rows, kernels):
    x = activation(20, 128)[:, 32:96].view(4, 5, 64)
    y, *copy = kernels.activation_quantize(x, function, 5, tile_rows)
    torch.testing.assert_close(y, FUNCTIONS[function].forward(x))
    alike(copy, references.quantize(x.reshape(20, 64), 5, tile_rows), 5, 20, 64)
