import pytest
import torch

from razorctl.ops import topk
from razorctl.ops.topk import pack_bits, topk_pack, topk_unpack, unpack_bits
from tests import references

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def naive(x: torch.Tensor, k: int) -> torch.Tensor:
    """x with zeros except for the k largest |x|, by sorting (|x|, position); NaN is largest."""
    flat = x.flatten().tolist()
    rank = sorted(range(len(flat)), key=lambda i: (flat[i] == flat[i], -abs(flat[i]), i))
    dense = torch.zeros_like(x).flatten()
    dense[rank[:k]] = x.flatten()[rank[:k]]
    return dense.view(x.shape)


def round_trip(x: torch.Tensor, k: int) -> torch.Tensor:
    values, bitmap = topk_pack(x, k)
    assert values.shape == (k,)
    assert values.dtype == x.dtype
    assert bitmap.shape == ((x.numel() + 7) // 8,)
    assert bitmap.dtype == torch.uint8
    assert sum(bin(byte).count("1") for byte in bitmap.tolist()) == k
    return topk_unpack(values, bitmap, list(x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (8,), (5, 13), (3, 7, 11), (64, 33)])
def test_keeps_the_k_largest(shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    for k in {1, max(1, x.numel() // 10), max(1, x.numel() // 2), x.numel()}:
        torch.testing.assert_close(round_trip(x, k), naive(x, k), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_position(dtype, device):
    zeros = torch.zeros(50, device=device, dtype=dtype)
    zeros[[3, 40]] = torch.tensor([2.0, -3.0], device=device, dtype=dtype)
    values, bitmap = topk_pack(zeros, 5)  # zeros outnumber k: a threshold would keep all of them
    assert unpack_bits(bitmap, 50).nonzero().flatten().tolist() == [0, 1, 2, 3, 40]
    assert values.tolist() == [0, 0, 0, 2, -3]
    constant = torch.full((9, 9), -1.5, device=device, dtype=dtype)
    assert torch.equal(round_trip(constant, 10), naive(constant, 10))


def test_nan_and_infinity_survive(device):
    x = torch.tensor([1.0, -torch.inf, 0.5, torch.nan, 2.0], device=device)
    back = round_trip(x, 3)
    assert back[3].isnan()
    assert back[[0, 1, 2, 4]].tolist() == [0, -torch.inf, 0, 2]


def test_works_on_strided_input():
    x = torch.randn(12, 10).T[::2]
    assert torch.equal(round_trip(x, 7), naive(x, 7))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_bits_round_trip(n, device):
    mask = torch.rand(n, device=device) < 0.3
    assert torch.equal(unpack_bits(pack_bits(mask), n), mask)
    first = sum(1 << i for i in range(min(8, n)) if mask[i])
    assert pack_bits(mask)[0].item() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_chunks_keep_the_same_elements(n, dtype, device, monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(topk, "CHUNK", 64)
    some = torch.randn(n, device=device).to(dtype)
    ties = (3 * some).round()
    huge = some * torch.finfo(dtype).max
    odd = torch.where(some > 1, torch.nan, huge)
    for x in (some, ties, huge, odd, torch.zeros_like(some)):
        for k in {1, max(1, n // 10), max(1, n // 2), n}:
            whole, chunked = references.topk_pack(x, k), topk_pack(x, k)
            torch.testing.assert_close(chunked, whole, rtol=0, atol=0, equal_nan=True)
            back = topk_unpack(*chunked, [n])
            want = topk.topk_unpack_on_cpu(*whole, [n])
            torch.testing.assert_close(back, want, rtol=0, atol=0, equal_nan=True)
