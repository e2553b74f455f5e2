"""A second launch of a kind passes the same arguments as Triton does; and the probing kernel."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel, compiler
from triton.runtime import jit

from razorctl.ops import kernels
from razorctl.ops.triton import int8, launch, probe
from razorctl.ops.triton.variants import Variant
from scripts.bench.cubins import compiled
from tests.launches import CARDS


class Compiled(CompiledKernel):
    """A compiled kernel that appends grid and arguments of launches to `runs`."""

    def __init__(self, runs):
        self.runs, self.module = runs, None
        self.function = self.packed_metadata = None

    def _init_handles(self):
        pass

    def launch_metadata(self, grid, stream, *args):
        pass

    def run(self, *args):
        self.runs.append((args[:3], args[9:]))  # between them stream, function and hooks


@pytest.fixture
def launched(monkeypatch):
    """The launches of `largest_kernel` through Triton, and others: grids and arguments."""
    kernel, through_triton, again = int8.largest_kernel, [], []
    backend = CUDABackend(GPUTarget("cuda", 89, 32))
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(*args, grid, warmup, **settings):
        bound, _, options = bind(*args, **settings)
        assert not warmup
        assert options["enable_fp_fusion"]
        through_triton.append((grid, tuple(bound.values())))
        return Compiled(again)

    monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(kernel, "plans", {})
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    return through_triton, again


def test_a_second_launch_of_a_kind_skips_triton(launched):
    through_triton, again = launched
    x, partial = torch.ones(3, 64), torch.ones(1, 64)
    for _ in range(2):
        int8.largest_kernel[(1,)](x, partial, 3, 64, 64, C=64, R=128, num_warps=8)
    assert len(through_triton) == len(again) == 1
    (grid, args), (first_grid, first_args) = again[0], through_triton[0]
    assert grid == (*first_grid, 1, 1)
    assert [id(a) if torch.is_tensor(a) else a for a in args] == [
        id(a) if torch.is_tensor(a) else a for a in first_args
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(3, 64, dtype=torch.bfloat16)},
        {"x": torch.ones(200)[1:193].view(3, 64)},
        {"rows": 16},
        {"grid": (2,)},
        {"R": 64},
        {"num_warps": 4},
    ],
    ids=["dtype", "alignment", "size", "grid", "constant", "option"],
)
def test_a_launch_of_another_kind_goes_through_triton(launched, change):
    through_triton, again = launched
    usual = {"x": torch.ones(3, 64), "rows": 3, "grid": (1,), "R": 128, "num_warps": 8}
    for kind in (usual, usual | change):
        x, rows, grid, r, warps = kind.values()
        int8.largest_kernel[grid](x, x, rows, 64, 64, R=r, C=64, num_warps=warps)
    assert len(through_triton) == 2
    assert not again


def test_plans_are_forgotten_before_they_are_too_many(launched, monkeypatch):
    monkeypatch.setattr(launch, "MOST_PLANS", 2)
    x = torch.ones(3, 64)
    for rows in range(1, 4):
        int8.largest_kernel[(1,)](x, x, rows, 64, 64, R=128, C=64)
    assert len(int8.largest_kernel.plans) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 33])
def test_sizes_on_the_host_are_tritons(size):
    assert launch.cdiv(size, 16) == triton.cdiv(size, 16)
    assert launch.next_power_of_2(size) == triton.next_power_of_2(size)


VARIANT = Variant(probe.probe_kernel, {"x": "*fp32"}, {"N": 32}, 1, 3, "probe")


@pytest.mark.parametrize("card", CARDS)
def test_it_compiles(card):
    assert compiled(VARIANT, card).stack == 0


def test_a_cache_that_cannot_be_written_is_an_error_of_files(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="file") as raised:
        compiled(VARIANT, 89)
    assert kernels.give_up(raised.value)
    kernels._failed.clear()
