import pytest
import torch

from razorctl.ops.buckets import BITS, FUNCTIONS, bucket_table, from_buckets, to_buckets
from razorctl.ops.packing import packed_bytes
from tests.references import opcheck

TABLES = [(function, bits) for function in FUNCTIONS for bits in BITS]
every_table = pytest.mark.parametrize(
    ("function", "bits"), [*TABLES, *(("hardswish", bits) for bits in BITS)]
)
BACKWARD = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}


def derivative(function: str, x: torch.Tensor) -> torch.Tensor:
    return BACKWARD[function](torch.ones_like(x), x)


@every_table
def test_intervals_ascend_and_hold_their_stand_ins(function, bits):
    ends, stand_ins = bucket_table(function, bits)
    assert len(ends) + 1 == len(stand_ins) == 2**bits
    assert list(ends) == sorted(set(ends))
    for low, x, high in zip((-9.0, *ends), stand_ins, (*ends, 9.0), strict=True):
        assert low <= x <= high


@every_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_naive_twin(function, bits, dtype, device):
    x = (2 * torch.randn(3, 7, 11, device=device)).to(dtype)
    ends, stand_ins = (torch.tensor(t, dtype=dtype) for t in bucket_table(function, bits))
    packed = to_buckets(x, function, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(1, x.numel(), bits),)
    back = from_buckets(packed, list(x.shape), function, bits, dtype)
    want = [stand_ins[sum(value > end for end in ends)] for value in x.flatten().cpu()]
    assert torch.equal(back.flatten().cpu(), torch.stack(want))


@pytest.mark.parametrize(("function", "bits"), TABLES)
def test_the_derivative_is_nearly_right_and_no_few_equal_intervals_do_better(function, bits):
    x = torch.randn(10_000, dtype=torch.float64)
    exact = derivative(function, x)
    back = from_buckets(to_buckets(x, function, bits), [10_000], function, bits, x.dtype)
    error = (derivative(function, back) - exact).square().mean()
    assert error < {4: 2e-3, 3: 4e-3, 2: 2e-2}[bits]
    width = 8 / 2**bits
    middles = ((x.clamp(-3.99, 3.99) + 4) / width).floor() * width + width / 2 - 4
    assert error < (derivative(function, middles) - exact).square().mean()


@every_table
def test_any_value_has_a_bucket(function, bits, device):
    x = torch.tensor([0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan], device=device)
    back = from_buckets(to_buckets(x, function, bits), [6], function, bits, x.dtype)
    assert back.isfinite().all()
    assert to_buckets(x[:0], function, bits).shape == (0,)


def test_registration():
    x = torch.randn(5, 3)
    opcheck(to_buckets, (x, "gelu", 3))
    packed = to_buckets(x, "gelu", 3)
    opcheck(from_buckets, (packed, [5, 3], "gelu", 3, torch.float32))
