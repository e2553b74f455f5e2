from functools import partial

import pytest
import torch

from razorctl.memory.costs import cost
from razorctl.memory.trace_cache import KernelWork
from razorctl.ops import gemm as op
from razorctl.ops import kernels
from razorctl.ops.quantize import limit
from razorctl.ops.triton import gemm
from razorctl.ops.triton.gemm_tiles import Tile
from tests import references

SMALL = [Tile(16, 32, 32, 1, 4, 3), Tile(32, 16, 32, 2, 4, 3)]
SIZES = [(1, 1, 1), (33, 17, 70), (16, 32, 64), (300, 20, 48)]


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    a[:, 0] = b[:, 0] = -128
    return a, b, torch.rand(m, 1), torch.rand(n) / 100, torch.randn(m), torch.randn(n)


SPLIT = f"{SMALL[0].label}-{gemm.SPLIT}"


@pytest.fixture(params=[*(tile.label for tile in SMALL), SPLIT, gemm.CUBLAS])
def way(request, interpreted, monkeypatch):
    """`scaled_gemm` on CPU tensors, in a small tile, split or not, or by `torch._int_mm`."""
    interpreted(gemm)
    monkeypatch.setattr(gemm, "_capability", lambda device: 80)
    monkeypatch.setattr(gemm, "tiles_for", lambda capability, aligned, copied: tuple(SMALL))
    monkeypatch.setattr(gemm, "_processors", lambda device: 7)
    monkeypatch.setattr(gemm, "FEWEST_TERMS", 16)
    monkeypatch.setattr(gemm.tuning, "fastest", lambda ways, *args: ways.get(request.param, other))
    other = partial(gemm.run_split, SMALL[0])  # of a product that need not be split
    cached = gemm.ways, gemm._choices
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


# Sums are the same for every dtype, which is that of the results alone.
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [*((*size, torch.float32) for size in SIZES)]
    + [(*SIZES[1], dtype) for dtype in (torch.bfloat16, torch.float16)],
)
def test_equals_the_reference(m, n, k, dtype, way):
    a, b, a_scale, b_scale, left, right = operands(m, n, k)
    for some, outer in ((a_scale, (left, right)), (None, (left, right)), (a_scale, (None, None))):
        got = gemm.scaled_gemm(a, b, some, b_scale, dtype, *outer)
        want = references.scaled_gemm(a, b, some, b_scale, dtype, *outer)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    exact = gemm.scaled_gemm(a, b, None, torch.ones(n), torch.float32)
    assert torch.equal(exact, (a.double() @ b.double().T).float())


@pytest.mark.parametrize("way", ["tile", gemm.SPLIT, gemm.CUBLAS])
def test_a_copy_equals_the_reference(way, interpreted, monkeypatch):
    tile = Tile(op.COPY_ROWS, 32, 32, 1, 4, 3)
    ways = {"tile": partial(gemm.run_tile, tile), gemm.SPLIT: partial(gemm.run_split, tile)}
    monkeypatch.setattr(
        interpreted(gemm).tuning, "fastest", lambda *_: ways.get(way, gemm.run_cublas)
    )
    for name, value in (("_capability", 80), ("_processors", 7)):
        monkeypatch.setattr(gemm, name, lambda device, value=value: value)
    monkeypatch.setattr(gemm, "FEWEST_TERMS", 16)
    monkeypatch.setattr(op, "PART", 150 * 48)  # one tile at a time
    a, b, a_scale, b_scale, left, right = operands(300, 48, 64)
    right[:2], b_scale[2] = torch.tensor([9e4, -9e4]), 0  # beyond half precision; equal values
    for outer in ((left, right), (None, None)):
        got = gemm.copied_gemm(a, b, a_scale, b_scale, torch.half, *outer)
        y = references.scaled_gemm(a, b, a_scale, b_scale, torch.float32, *outer)
        most = limit(torch.half)
        want = references.quantize(y.clamp(-most, most), 8, op.COPY_ROWS)
        apart = (got[0].int() - want.packed.int()).view(y.shape).abs()
        assert apart.max() <= 1
        assert (apart[:, 2:] > 0).float().mean() < 2e-3
        assert torch.equal(got[2], want.scale)
        assert (got[1] - want.zero_point).abs().max() <= 1


def test_planning_counts_the_parts_that_cublas_makes(interpreted, monkeypatch):
    m, n, k = 100, 24, 32
    work = operands(m, n, k)[:4]
    out, products = torch.empty(m, n, dtype=torch.half), []
    monkeypatch.setattr(op, "PART", 40 * n)

    def recorded(*args):
        products.append(op.cublas_gemm(*args))
        return products[-1]

    monkeypatch.setattr(interpreted(gemm), "cublas_gemm", recorded)
    gemm.run_cublas(*work, None, None, gemm.GemmOutput(out))
    assert torch.equal(out, references.scaled_gemm(*work, torch.half))
    assert [len(product) for product in products] == [40, 40, 20]
    with kernels.assumed(dot=False):
        said = cost(torch.ops.razorctl.scaled_gemm.default, (*work, torch.half), {}, out)
    assert said.workspace == products[0].nbytes
    want = []
    for product in products:
        rows, sums = len(product), product.nbytes
        # The scales of all columns are read again, which is next to nothing.
        scaled = sums + rows * (2 * n + 4) + 4 * n * rows // m
        want += [
            KernelWork(
                "int8", 2 * rows * n * k, rows * k + n * k + sums,
                terms=k, programs=1, written=sums,
            ),
            KernelWork("fp32", 0, scaled, own=True),
        ]  # fmt: skip
    assert sorted(said.kernels.elements()) == sorted(want)


def test_operands_of_any_layout(way):
    a, b, a_scale, b_scale, *_ = operands(20, 24, 64)
    want = references.scaled_gemm(a, b, a_scale, b_scale, torch.float32)
    wide = torch.zeros(20, 81, dtype=torch.int8)
    wide[:, 1:65] = a
    for other in (a.T.contiguous().T, wide[:, 1:65]):
        got = gemm.scaled_gemm(other, b.T.contiguous().T, a_scale, b_scale, torch.float32)
        torch.testing.assert_close(got, want)


def test_sums_too_long_for_int32_are_made_in_parts(way, monkeypatch):
    a, b, a_scale, b_scale, left, right = operands(5, 6, 200)
    monkeypatch.setattr(gemm, "MOST_TERMS", 64)
    got = gemm.scaled_gemm(a, b, a_scale, b_scale, torch.float32, left, right)
    want = references.scaled_gemm(a, b, a_scale, b_scale, torch.float32, left, right)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-2)


def test_products_of_few_tiles_are_split(monkeypatch):
    tokens, wide, tall = 128 * 197, Tile(128, 256, 128, 1, 8, 4), Tile(128, 128, 128, 1, 8, 4)
    # dW of ViT-B's attention output, and of its first MLP layer: 18, 36 and 72 tiles.
    assert gemm.programs_per_tile(wide, 768, 768, tokens, 132) == 6  # 108 programs
    assert gemm.programs_per_tile(tall, 768, 768, tokens, 132) == 3  # 108 too
    assert gemm.programs_per_tile(wide, 3072, 768, tokens, 132) == 3  # 216 for two rounds
    assert gemm.programs_per_tile(wide, 768, 768, 4096, 132) == 4  # of no fewer terms
    assert gemm.programs_per_tile(wide, 768, 768, 197, 132) == 1
    assert gemm.programs_per_tile(wide, tokens, 768, 3072, 132) == 1  # dX has enough tiles
    assert gemm.programs_per_tile(wide, 2**13, 2**12, tokens, 132) == 1
    few, many = gemm.ways(90, True, True), gemm.ways(90, True, False)
    assert next(iter(few)).endswith(gemm.SPLIT)  # what is not timed runs so
    assert set(many) == {label for label in few if not label.endswith(gemm.SPLIT)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_a_split_product_takes_no_more_than_planning_counts(dtype, interpreted, monkeypatch):
    interpreted(gemm)
    monkeypatch.setattr(gemm, "_processors", lambda device: 7)
    monkeypatch.setattr(gemm, "FEWEST_TERMS", 16)
    work, out, products = operands(40, 24, 64), torch.empty(40, 24, dtype=dtype), []
    scale = gemm._scale

    def noted(product, *args):
        products.append(product)
        scale(product, *args)

    monkeypatch.setattr(gemm, "_scale", noted)
    gemm.run_split(SMALL[0], *work, gemm.GemmOutput(out))
    torch.testing.assert_close(out, references.scaled_gemm(*work[:4], dtype, *work[4:]))
    (product,) = products
    taken = 0 if product.data_ptr() == out.data_ptr() else product.nbytes
    assert taken == (0 if dtype == torch.float32 else 4 * out.numel())
    with kernels.assumed(dot=True):
        said = cost(torch.ops.razorctl.scaled_gemm.default, (*work[:4], dtype), {}, out)
    assert said.workspace >= taken


def test_the_longest_sum_fits():
    assert gemm.MOST_TERMS * 128**2 < 2**31
    assert gemm.MOST_TERMS % 16 == 0


@pytest.mark.parametrize("capability", [75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_every_card_has_ways(capability):
    labels = list(gemm.ways(capability, True))
    assert labels[-1] == gemm.CUBLAS
    assert (len(labels) == 1) == (capability < 80)
    assert set(gemm.ways(capability, False)) <= set(labels)
