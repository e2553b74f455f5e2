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


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8)], ids=["heads", "no heads"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_seed_says_what_is_dropped(shape, masked, device):
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in "qkv")
    mask = torch.randn(5, 5, device=device, requires_grad=True) if masked else None
    inputs = [t for t in (q, k, v, mask) if t is not None]
    args = q, k, v, mask, not masked, None, False, 0.4, torch.tensor([2**61 + 7])
    before = torch.get_rng_state()
    got = attention_again(*args).transpose(-3, -2)
    given = torch.autograd.grad(got.square().sum(), inputs)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2**61 + 7)
    want = F.scaled_dot_product_attention(q, k, v, mask, 0.4, not masked)
    assert torch.equal(got, want)
    assert not torch.equal(want, F.scaled_dot_product_attention(q, k, v, mask, 0.4, not masked))
    for a, b in zip(given, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)
