import pytest
import torch

from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.quantize import dequantize, quantize
from razorctl.ops.weight_grad import linear_weight_grad


@pytest.mark.parametrize("function", [None, "silu"])
@pytest.mark.parametrize("shape", [(50, 7), (50, 64), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_with_what_is_unpacked(dtype, shape, function, device, monkeypatch):
    rows, columns = shape
    copy = *quantize(torch.randn(shape, device=device).to(dtype), 4, 20), torch.randn(columns), 4
    copy = tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in copy)
    dy = torch.randn(rows, 5, device=device).to(dtype)
    x = dequantize(*copy, rows, 20, dtype)
    want = dy.T @ (FUNCTIONS[function].forward(x) if function else x)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    got = linear_weight_grad(dy, *copy, 20, function)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)


def test_registration():
    parts = quantize(torch.randn(18, 5), 4, 7)
    dy = torch.randn(18, 3)
    torch.library.opcheck(linear_weight_grad, (dy, *parts, None, 4, 7, "gelu"))
    torch.library.opcheck(linear_weight_grad, (dy, *parts, torch.randn(5), 4, 7, None))
