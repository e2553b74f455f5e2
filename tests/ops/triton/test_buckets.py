import pytest
import torch

from razorctl.ops import buckets
from tests.ops.triton.test_quantize import TYPES


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import buckets

    return interpreted(buckets)


@pytest.mark.parametrize("bits", buckets.BITS)
@pytest.mark.parametrize("function", buckets.FUNCTIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip([(1,), (3, 7, 11), (90, 96)], TYPES, strict=True))
)
def test_buckets(shape, dtype, function, bits, kernels):
    x = 3 * torch.randn(shape)
    x.view(-1)[0] = buckets.bucket_table(function, bits)[0][
        1
    ]  # an end belongs to the interval below
    packed = buckets.to_buckets(x.to(dtype), function, bits)
    assert torch.equal(kernels.to_buckets(x.to(dtype), function, bits), packed)
    like = list(shape), function, bits, dtype
    assert torch.equal(kernels.from_buckets(packed, *like), buckets.from_buckets(packed, *like))


def test_what_is_no_number_lies_in_the_last_interval(kernels):
    x = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert torch.equal(kernels.to_buckets(x, "gelu", 4), buckets.to_buckets(x, "gelu", 4))
