import math

import pytest
import torch
import torch.nn.functional as F

from razorctl.ops.pool import max_pool, max_pool_grad, outputs

# Kernel, stride, padding, dilation; whether sizes round up.
WINDOWS = [
    ([2, 2, 2, 2, 0, 0, 1, 1], False),
    ([3, 3, 2, 2, 0, 0, 1, 1], True),
    ([3, 2, 1, 3, 1, 0, 2, 1], False),
    ([5, 5, 3, 3, 2, 2, 1, 1], True),
    ([16, 16, 4, 4, 8, 8, 1, 1], False),
]


@pytest.mark.parametrize(("geometry", "ceil_mode"), WINDOWS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 19, 18), (1, 4, 17, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_maxima_and_gradients_are_those_of_stock(geometry, ceil_mode, shape, dtype, last, device):
    x = torch.randn(shape, device=device).to(dtype)
    x[0, 0, :6] = 1  # ties
    x[0, 1, 3, 3], x[0, 2] = math.nan, -math.inf
    x = x.to(memory_format=torch.channels_last) if last else x
    options = [geometry[i : i + 2] for i in (0, 2, 4, 6)]
    leaf = x.clone().requires_grad_()
    want = F.max_pool2d(leaf, *options, ceil_mode)
    dy = torch.randn_like(want)
    want.backward(dy)
    y, places = max_pool(x, geometry, ceil_mode)
    assert y.shape == outputs(x.shape, geometry, ceil_mode)
    assert y.stride() == want.stride()
    torch.testing.assert_close(y, want.detach(), rtol=0, atol=0, equal_nan=True)
    dx = max_pool_grad(dy, places, list(shape), geometry, ceil_mode)
    assert torch.equal(dx, leaf.grad)
