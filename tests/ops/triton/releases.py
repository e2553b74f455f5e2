"""Compiles variants by another Triton than the installed one, in a process of its own.

    python -m tests.ops.triton.releases RELEASE CARD <VARIANTS

The path must lead to that Triton first. VARIANTS is a pickled list of what `named` returns; each
that does not compile, or spills, is a line of the output.
"""

import importlib
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import triton

from razorctl.ops.triton.compiled import compiled
from razorctl.ops.triton.variants import Variant


def named(variant: Variant) -> dict[str, Any]:
    """A variant whose kernel goes by its name, which another process can read."""
    values = {field.name: getattr(variant, field.name) for field in fields(variant)}
    return values | {"kernel": (variant.kernel.fn.__module__, variant.kernel.fn.__name__)}


def found(values: dict[str, Any]) -> Variant:
    """The variant that `named` named."""
    module, name = values["kernel"]
    return Variant(**values | {"kernel": getattr(importlib.import_module(module), name)})


def wrong(variant: Variant, card: int) -> str | None:
    """What is wrong with a variant, in a line."""
    try:
        stack = compiled(variant, card).stack
    except Exception as error:
        return f"{variant.label} fails: {type(error).__name__}: {error}".replace("\n", " ")
    return f"{variant.label} spills {stack} bytes" if stack else None


def main() -> None:
    release, card = sys.argv[1], int(sys.argv[2])
    assert triton.__version__.startswith(release), (triton.__version__, triton.__file__)
    variants = [found(values) for values in pickle.load(sys.stdin.buffer)]
    with ThreadPoolExecutor(2) as threads:
        for line in threads.map(lambda variant: wrong(variant, card), variants):
            if line:
                print(line)


if __name__ == "__main__":
    main()
