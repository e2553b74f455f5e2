import pytest
import torch

from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.quantize import dequantize, quantize
from razorctl.ops.weight_grad import linear_weight_grad


@pytest.mark.parametrize("function", [None, "silu"])
@pytest.mark.parametrize("shape", [(1, 50, 7), (3, 20, 64), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_with_what_is_unpacked(dtype, shape, function, device, monkeypatch):
    blocks, rows, columns = shape
    packed, zero_point, scale = quantize(torch.randn(shape, device=device).to(dtype), 4)
    bias = torch.randn(columns, device=device)
    dy = torch.randn(blocks * rows, 5, device=device).to(dtype)
    x = dequantize(packed, zero_point, scale, bias, 4, rows, dtype).flatten(0, 1)
    want = dy.T @ (FUNCTIONS[function].forward(x) if function else x)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    got = linear_weight_grad(dy, packed, zero_point, scale, bias, 4, function)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)


def test_registration():
    parts = quantize(torch.randn(2, 9, 5), 4)
    dy = torch.randn(18, 3)
    torch.library.opcheck(linear_weight_grad, (dy, *parts, None, 4, "gelu"))
    torch.library.opcheck(linear_weight_grad, (dy, *parts, torch.randn(5), 4, None))
