import pytest
import torch

from razorctl.ops.gemm import (
    cublas_gemm,
    exact_gemm,
    has_int8_gemm,
    scaled_gemm,
)
from razorctl.ops.int8 import int8_columns, int8_rows
from tests import references

SIZES = [(1, 1, 1), (17, 8, 8), (5, 33, 17), (40, 16, 24), (33, 2100, 9), (205, 555, 120)]


def codes(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def test_chunks_change_nothing(device, monkeypatch):
    x = torch.randn(50, 7, device=device)
    monkeypatch.setattr("razorctl.ops.gemm.PART", 30)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    (a, a_scale, *_), (b, b_scale) = int8_rows(x), int8_columns(x.T.contiguous())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for rank_one in ((), (torch.arange(50.0, device=device), torch.ones(50, device=device))):
            args = a, b, a_scale, b_scale, dtype, *rank_one
            torch.testing.assert_close(
                scaled_gemm(*args), references.scaled_gemm(*args), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_every_gemm_is_exact(m, k, n, vnni, device, monkeypatch):
    if not vnni:
        monkeypatch.setattr("razorctl.ops.gemm.has_vnni", lambda: False)
    a, b = codes(m, k, device=device), codes(n, k, device=device)
    b[:, 0] = a[:, 0] = -128  # the largest products
    want = (a.double() @ b.double().t()).to(torch.int32)
    assert torch.equal(exact_gemm(a, b), want)
    # Of those that a CPU computes, cuBLASLt takes some alone.
    if device.type == "cpu" or has_int8_gemm(device):
        assert torch.equal(cublas_gemm(a, b), want)
    for scale in (None, torch.full((m, 1), 2.0, device=device)):
        for left, right in ((a, b), (a, b.T.contiguous().T), (a.T.contiguous().T, b)):
            got = scaled_gemm(left, right, scale, torch.ones(n, device=device), torch.float32)
            assert torch.equal(got, want.float() * (1 if scale is None else 2))


def test_sums_that_single_precision_only_just_holds(device):
    a = torch.full((2, 4999), 127, dtype=torch.int8, device=device)
    assert (exact_gemm(a, a) == 4999 * 127**2).all()  # an odd number


def test_without_int8_gemms_the_numbers_are_the_same(device, monkeypatch):
    a, a_scale, *_ = int8_rows(torch.randn(50, 70, device=device))
    b, b_scale = int8_columns(torch.randn(70, 20, device=device))
    got = scaled_gemm(a, b, a_scale, b_scale, torch.float32)
    monkeypatch.setattr("razorctl.ops.gemm.has_int8_gemm", lambda device: False)
    monkeypatch.setattr("razorctl.ops.gemm.has_vnni", lambda: False)
    assert torch.equal(scaled_gemm(a, b, a_scale, b_scale, torch.float32), got)


@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty_products(sizes, device):
    m, k, n = sizes
    got = scaled_gemm(
        codes(m, k, device=device),
        codes(n, k, device=device),
        torch.ones(m, 1, device=device),
        torch.ones(n, device=device),
        torch.bfloat16,
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.zeros(m, n, device=device, dtype=torch.bfloat16))
