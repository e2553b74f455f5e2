"""Every kernel compiles for every card, without a spill and within its shared memory."""

import importlib
import pkgutil

import pytest

import razorctl.ops.triton
from razorctl.ops.triton.compiled import compiled
from razorctl.ops.triton.launch import OPTIONS

SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have
INT8_DOT = r"mma\.sync[\w.]*\.s32\.s8\.s8|wgmma\.mma_async[\w.]*\.s32\.s8\.s8|tcgen05\.mma[\w.:]*i8"
MODULES = [
    name
    for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__)
    if hasattr(importlib.import_module(f"razorctl.ops.triton.{name}"), "variants")
]


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("name", MODULES)
def test_variants_compile_without_spilling(name, capability):
    variants = list(importlib.import_module(f"razorctl.ops.triton.{name}").variants(capability))
    assert variants
    for variant in variants:
        assert variant.kernel.run.keywords == OPTIONS, variant.label
        found = compiled(variant, capability)
        assert found.stack == 0, variant.label
        assert found.shared <= 1024 * SHARED[capability], variant.label
        if capability < 80:  # tl.dot on int8 does not compile, on fp16 it is scalar and spills
            assert "tt.dot" not in found.ttir, variant.label
        else:
            dots = found.ttir.count("tt.dot ")
            assert bool(dots) == bool(found.instructions(INT8_DOT)), variant.label
