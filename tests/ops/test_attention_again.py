import pytest
import torch
import torch.nn.functional as F

from razorctl.ops.attention_again import attention_again
from tests.references import opcheck


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_values(masked, dtype, device):
    q, k = (torch.randn(2, heads, 5, 8, device=device, dtype=dtype) for heads in (4, 2))
    v = torch.randn(2, 2, 5, 6, device=device, dtype=dtype)
    mask = torch.randn(2, 1, 5, 5, device=device, dtype=dtype) if masked else None
    args = q, k, v, mask, not masked, 0.3, True
    want = F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, not masked, scale=0.3, enable_gqa=True
    )
    got = attention_again(*args)
    assert got.is_contiguous()
    assert torch.equal(got.transpose(1, 2), want)
    opcheck(attention_again, args)
