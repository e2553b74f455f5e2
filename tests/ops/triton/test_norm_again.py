import pytest
import torch

from razorctl.ops.norm_again import norm_again
from tests.ops.test_norm_again import arguments
from tests.ops.triton.test_quantize import TYPES, alike


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import norm_again

    return interpreted(norm_again)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", ["of x_hat", "of x", "scaled"])
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 1), (150, 128)])
def test_norm_again(rows, tile_rows, form, dtype, kernels):
    args, _ = arguments(rows, 192, tile_rows, form, dtype)
    want = norm_again.body(*args)
    alike(kernels.norm_again(*args), (*want, 8, tile_rows), 8, rows, 192)


def test_infinities_become_the_ends(kernels):
    (copy, f, *others), _ = arguments(8, 64, 8, "of x_hat", torch.float32)
    f[1, 3], f[2, 5] = float("inf"), -float("inf")
    codes, *ends = kernels.norm_again(copy, f, *others)
    assert (codes.view(8, 64)[1, 3], codes.view(8, 64)[2, 5]) == (255, 0)
    want = norm_again.body(copy, f, *others)
    torch.testing.assert_close(ends, list(want[1:]), rtol=2**-7, atol=1)
