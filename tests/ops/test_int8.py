import pytest
import torch

from razorctl.ops.int8 import (
    LEVELS,
    balance,
    balance_reference,
    cublas_gemm,
    exact_gemm,
    has_int8_gemm,
    int8_columns,
    int8_columns_reference,
    int8_rows,
    int8_rows_reference,
    scaled_gemm,
    scaled_gemm_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [(1, 1, 1), (17, 8, 8), (5, 33, 17), (40, 16, 24), (33, 2100, 9)]


def codes(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def with_scales(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rows of `x` (dim 1) or of its columns (dim 0), along x."""
    if dim == 1:
        return int8_rows(x)[:2]
    got, scale = int8_columns(x)
    return got.t(), scale.unsqueeze(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(40, 7), (1, 5), (13, 1)])
def test_int8_is_within_half_a_step(shape, dim, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    got, scale = with_scales(x, dim)
    assert got.dtype == torch.int8
    assert got.abs().max() == LEVELS
    assert scale.shape == x.amax(dim, keepdim=True).shape
    back = got.double() * scale.double()
    assert ((back - x.double()).abs() <= scale.double() / 2 * (1 + 1e-5)).all()
    torch.testing.assert_close(got.T.contiguous(), with_scales(x.T, 1 - dim)[0].contiguous())
    torch.testing.assert_close(int8_rows(x)[2].double(), x.double().sum(0), rtol=1e-5, atol=1e-5)


def test_chunks_change_nothing(device, monkeypatch):
    x = torch.randn(50, 7, device=device)
    monkeypatch.setattr("razorctl.ops.int8.ELEMENTS", 30)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    for got, want in zip(int8_rows(x), int8_rows_reference(x), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(int8_columns(x), int8_columns_reference(x), strict=True):
        assert torch.equal(got, want)
    (a, a_scale, _), (b, b_scale) = int8_rows(x), int8_columns(x.T.contiguous())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for rank_one in ((), (torch.arange(50.0, device=device), torch.ones(50, device=device))):
            args = a, b, a_scale, b_scale, dtype, *rank_one
            torch.testing.assert_close(
                scaled_gemm(*args), scaled_gemm_reference(*args), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_degenerate_values(dtype, device):
    huge = 0.99 * torch.finfo(dtype).max
    for value in (0.0, 1.0, -3.0, huge, -huge, 1e-30, 1e-42):
        x = torch.full((6, 3), value, device=device, dtype=dtype)
        for dim in (0, 1):
            got, scale = with_scales(x, dim)
            torch.testing.assert_close((got * scale).to(dtype), x, rtol=1e-2, atol=1e-37)
    for empty in ((0, 3), (3, 0)):
        for dim in (0, 1):
            got, scale = with_scales(torch.empty(empty, device=device), dim)
            assert got.shape == empty
            assert scale.shape[dim] == 1


def test_balance_halves_the_spread_of_the_rows(device, monkeypatch):
    x = torch.randn(50, 7, device=device) * torch.logspace(0, -4, 50, device=device)[:, None]
    codes, scale, _ = int8_rows(x)
    want = balance_reference(codes, scale)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 30})
    got, balanced = balance(codes, scale)
    assert torch.equal(got, want[0])
    got = got.t()
    torch.testing.assert_close(balanced, want[1])
    torch.testing.assert_close(balanced, (scale * scale.max()).sqrt())
    assert ((got * balanced - codes * scale).abs() <= balanced / 2 * (1 + 1e-5)).all()
    none = torch.zeros(4, 1, device=device)
    codes, scale = balance(torch.zeros(4, 3, dtype=torch.int8, device=device), none)
    assert not codes.any()
    assert not scale.any()
    empty = torch.empty(0, 3, dtype=torch.int8, device=device)
    assert balance(empty, none[:0])[0].shape == (3, 0)


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_both_gemms_are_exact(m, k, n, device):
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
    a, a_scale, _ = int8_rows(torch.randn(50, 70, device=device))
    b, b_scale = int8_columns(torch.randn(70, 20, device=device))
    got = scaled_gemm(a, b, a_scale, b_scale, torch.float32)
    monkeypatch.setattr("razorctl.ops.int8.has_int8_gemm", lambda device: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
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


def test_registration():
    x = torch.randn(20, 16)
    torch.library.opcheck(int8_rows, (x,))
    torch.library.opcheck(int8_columns, (x,))
    (a, a_scale, _), (b, b_scale) = int8_rows(x), int8_columns(torch.randn(16, 8))
    torch.library.opcheck(balance, (a, a_scale))
    torch.library.opcheck(scaled_gemm, (a, b, a_scale, b_scale, torch.float32))
    rank_one = torch.randn(20), torch.randn(8)
    torch.library.opcheck(scaled_gemm, (a, b, None, b_scale, torch.bfloat16, *rank_one))
