import pytest
import torch

from razorctl.ops.functions import applied
from razorctl.ops.quantize import dequantize
from razorctl.ops.weight_grad import linear_weight_grad
from tests.references import copied


@pytest.mark.parametrize("function", [None, "silu"])
@pytest.mark.parametrize("shape", [(50, 7), (50, 64), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_with_what_is_unpacked(dtype, shape, function, device, monkeypatch):
    rows, columns = shape
    copy = copied(torch.randn(shape, device=device).to(dtype), 4, 20)
    copy = copy._replace(bias=torch.randn(columns, device=device))
    dy = torch.randn(rows, 5, device=device).to(dtype)
    want = dy.T @ applied(function, dequantize(copy, rows, dtype))
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    got = linear_weight_grad(dy, copy, function)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)
