import pytest
import torch

from razorctl.ops import topk as op
from razorctl.ops.topk import topk_unpack_on_cpu
from razorctl.ops.triton import topk
from tests import references


@pytest.fixture
def small(interpreted, monkeypatch):
    """The kernels on CPU tensors, with two blocks of 64 elements to a program."""
    interpreted(topk)
    monkeypatch.setattr(topk, "BLOCK", 64)
    monkeypatch.setattr(topk, "_stretch", lambda n: 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 65, 300])
def test_saves_what_the_reference_saves(n, dtype, small):
    some = torch.randn(n).to(dtype)
    huge = some * torch.finfo(dtype).max  # half of it is infinite
    odd = torch.where(some > 1, torch.nan, huge)
    for x in (some, (3 * some).round(), odd, torch.zeros_like(some)):
        for k in {max(1, n // 3), n}:
            values, bitmap = topk.topk_pack(x, k)
            want = references.topk_pack(x, k)
            assert torch.equal(bitmap, want[1])
            torch.testing.assert_close(values, want[0], rtol=0, atol=0, equal_nan=True)
            dense = topk.topk_unpack(values, bitmap, [n])
            want_dense = topk_unpack_on_cpu(*want, [n])
            torch.testing.assert_close(dense, want_dense, rtol=0, atol=0, equal_nan=True)


def test_shapes_and_layouts(small):
    x = torch.randn(7, 40).T
    values, bitmap = topk.topk_pack(x, 50)
    dense = topk.topk_unpack(values, bitmap, list(x.shape))
    assert torch.equal(dense, topk_unpack_on_cpu(*references.topk_pack(x, 50), [40, 7]))


@pytest.mark.parametrize(
    "pack", [topk.topk_pack, op.topk_pack.body, op.topk_pack_on_cpu, op.topk_pack]
)
def test_nothing_is_packed_of_nothing(pack, small):
    """By the kernel, its body, the body on a CPU, and what runs there."""
    values, bitmap = pack(torch.empty(0, 3, dtype=torch.bfloat16), 0)
    assert (values.shape, values.dtype) == ((0,), torch.bfloat16)
    assert (bitmap.shape, bitmap.dtype) == ((0,), torch.uint8)
    for unpack in (topk.topk_unpack, op.topk_unpack.body, op.topk_unpack):
        assert unpack(values, bitmap, [0, 3]).shape == (0, 3)


def test_stretches_are_whole_blocks_and_few():
    for n in (1, topk.BLOCK, 10**7, 2**31 - 1):
        stretch = topk._stretch(n)
        assert stretch % topk.BLOCK == 0
        assert -(-n // stretch) <= int(topk.PROGRAMS)
    assert topk.BLOCK % 8 == 0


def test_what_is_too_large_or_too_wide_is_left_to_torch():
    assert not topk.takes_pack(torch.zeros(3, dtype=torch.float64), 1)
    assert not topk.takes_pack(torch.empty(2**31, device="meta", dtype=torch.float16), 1)
    assert topk.takes_pack(torch.zeros(3), 1)
    assert topk.takes_unpack(torch.zeros(1), torch.zeros(1, dtype=torch.uint8), [3])
