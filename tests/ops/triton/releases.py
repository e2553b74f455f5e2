"""Compiles variants by another Triton than the installed one, in a process of its own.

    python -m tests.ops.triton.releases RELEASE CARD <VARIANTS

PYTHONPATH must lead to that Triton first. VARIANTS is a pickled list of results of `named`; the
output has a line for each that does not compile or has another fault.
"""

import importlib
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import triton

from razorctl.ops.triton.variants import Variant
from scripts.bench.cubins import CompiledKernel, compiled

SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have
INT8_DOT = r"mma\.sync[\w.]*\.s32\.s8\.s8|wgmma\.mma_async[\w.]*\.s32\.s8\.s8|tcgen05\.mma[\w.:]*i8"


def named(variant: Variant) -> dict[str, Any]:
    """The fields of a variant with the name of its kernel, for another process."""
    values = {field.name: getattr(variant, field.name) for field in fields(variant)}
    return values | {"kernel": (variant.kernel.fn.__module__, variant.kernel.fn.__name__)}


def unnamed(values: dict[str, Any]) -> Variant:
    """The inverse of `named`."""
    module, name = values["kernel"]
    return Variant(**values | {"kernel": getattr(importlib.import_module(module), name)})


def wrong(variant: Variant, card: int) -> str | None:
    """The fault of a variant, in a line, or None."""
    try:
        kernel = compiled(variant, card)
    except Exception as error:
        return f"{variant.label} fails: {type(error).__name__}: {error}".replace("\n", " ")
    why = fault(kernel, card)
    return why and f"{variant.label} {variant.constexprs} {why}"


def fault(kernel: CompiledKernel, card: int) -> str | None:
    """The fault of a compiled kernel, or None."""
    # Before sm_80 tl.dot on int8 does not compile, on fp16 it is scalar and spills.
    dot, product = "tt.dot " in kernel.ttir, bool(kernel.instructions(INT8_DOT))
    for why, is_so in (
        (f"spills {kernel.stack} bytes", kernel.stack),
        (f"asks for {kernel.shared} bytes of shared memory", kernel.shared > 1024 * SHARED[card]),
        (f"has a product: {dot}, its instructions: {product}", dot != product),
        ("has a product", dot and card < 80),
    ):
        if is_so:
            return why
    return None


def main() -> None:
    release, card = sys.argv[1], int(sys.argv[2])
    assert triton.__version__.startswith(release), (triton.__version__, triton.__file__)
    variants = [unnamed(values) for values in pickle.load(sys.stdin.buffer)]
    with ThreadPoolExecutor(2) as threads:
        for line in threads.map(lambda variant: wrong(variant, card), variants):
            if line:
                print(line)


if __name__ == "__main__":
    main()
