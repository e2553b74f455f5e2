"""Every kernel compiles for every card, without a spill and within its shared memory.

Of each kernel the variants that take most; with --every-variant all that it may be launched as.
"""

import importlib
import pkgutil

import pytest

import razorctl.ops.triton
from razorctl.ops.triton.compiled import compiled
from razorctl.ops.triton.launch import Kernel

SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have
INT8_DOT = r"mma\.sync[\w.]*\.s32\.s8\.s8|wgmma\.mma_async[\w.]*\.s32\.s8\.s8|tcgen05\.mma[\w.:]*i8"
MODULES = {
    name: module
    for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__)
    if hasattr(module := importlib.import_module(f"razorctl.ops.triton.{name}"), "variants")
}


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("--every-variant")
    found = [
        pytest.param(capability, variant, id=f"sm_{capability} {name}: {variant.label}")
        for capability in SHARED
        for name, module in MODULES.items()
        for variant in module.variants(capability, every)
    ]
    metafunc.parametrize(("capability", "variant"), found)


def test_compiles_without_spilling(capability, variant):
    assert isinstance(variant.kernel, Kernel)  # so that it is launched with the same options
    found = compiled(variant, capability)
    assert found.stack == 0
    assert found.shared <= 1024 * SHARED[capability]
    if capability < 80:  # tl.dot on int8 does not compile, on fp16 it is scalar and spills
        assert "tt.dot" not in found.ttir
    else:
        assert ("tt.dot " in found.ttir) == bool(found.instructions(INT8_DOT))
