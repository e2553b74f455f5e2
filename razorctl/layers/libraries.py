"""The stock types that have a razor class: torch's own and those of timm and transformers.

Each kind of torch's layers has a file. It defines `SWAPS`, which maps exact stock types to their
razor classes. Each library has a file of its name. It defines `SWAPS` too, and `BRANCHES`, which
maps exact block types to their residual branches. A branch is the names of the modules in it that
save something; the last of them gives the branch's output. `PRE_NORM` maps those block types that
are nothing but residual connections with a norm first to all modules of each connection.
"""

import importlib
import sys
from functools import cache
from typing import Any

from torch import nn

from razorctl import layers
from razorctl.config import registry
from razorctl.layers.base import RazorLayer

LIBRARIES = ("timm", "torchvision", "transformers")  # a file is imported once its library is loaded


@cache
def _of_torch() -> dict[type[nn.Module], type[RazorLayer]]:
    # `traced` is for a program that is being compiled, and loads the compiler.
    skip = ("libraries", "traced", *LIBRARIES)
    files = registry.modules(layers.__name__, layers.__path__, skip=skip)
    return {stock: razor for file in files for stock, razor in getattr(file, "SWAPS", {}).items()}


def swaps() -> dict[type[nn.Module], type[RazorLayer]]:
    """Stock types -> razor classes: torch's, and those of every library that is loaded.

    A library that is not loaded has no module in any model, and may be slow to load.
    """
    return _of_torch() | _registered("SWAPS")


def branches() -> dict[type[nn.Module], tuple[tuple[str, ...], ...]]:
    """Stock block types -> their residual branches, of every library that is loaded."""
    return _registered("BRANCHES")


def connections() -> tuple[
    dict[type[nn.Module], tuple[tuple[str, ...], ...]], frozenset[type[nn.Module]]
]:
    """Block types -> their residual connections, and what may follow a norm in them."""
    first = [
        importlib.import_module(f"razorctl.layers.{library}").LINEAR_FIRST
        for library in LIBRARIES
        if library in sys.modules
    ]
    return _registered("PRE_NORM"), frozenset().union(*first)


def _registered(name: str) -> dict[type[nn.Module], Any]:
    found: dict[type[nn.Module], Any] = {}
    for library in LIBRARIES:
        if library in sys.modules:
            found |= getattr(importlib.import_module(f"razorctl.layers.{library}"), name)
    return found
