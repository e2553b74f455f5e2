"""Kernels compiled ahead of their launches."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.errors import CompilationError

from razorctl.ops.triton.launch import WARP
from razorctl.ops.triton.variants import Variant


def compile_all(variants: Sequence[Variant], capability: int, threads: int) -> None:
    """Compiles variants for the card of this process into Triton's cache, where launches find them.

    Threads share the work where Triton releases the GIL: on two cores two threads took at most 0.7
    of the time of one for the 39 kernels of a ViT; two processes took longer, as each imports
    torch. Raises the first error once the other variants are compiled.
    """
    target = GPUTarget("cuda", capability, WARP)

    def one(variant: Variant) -> None:
        kernel = _compiled(variant, target)
        with suppress(Exception):  # a launch raises the same error
            # Triton 3.6 compiles one in C for each signature.
            CudaLauncher(kernel.src, kernel.metadata)

    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(one, variant) for variant in variants]
    for each in done:
        each.result()


def _compiled(variant: Variant, target: GPUTarget, tries: int = 5) -> Any:
    """The kernel of a variant, which is compiled again if `ast` has failed.

    Before Python 3.13 `ast.parse` raises SystemError at times if several threads are in it.
    """
    try:
        return triton.compile(variant.source(target), target=target, options=variant.options)
    except CompilationError as error:
        if tries > 1 and isinstance(error.__cause__, SystemError):
            return _compiled(variant, target, tries - 1)
        raise
