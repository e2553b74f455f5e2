"""What is swapped and skipped in the models of libraries beside torch: a file a library.

A library file has the name of its library and defines `SWAPS`, as a layer file does, for the
library's own layers; and `BRANCHES`, which maps its exact block types to the residual branches in
them: the names of the modules that save something, the last of which gives the branch's output.
"""

import importlib
import sys
from typing import Any

from torch import nn

from razorctl import layers
from razorctl.layers import RazorLayer


def swaps() -> dict[type[nn.Module], type[RazorLayer]]:
    """Stock types -> razor classes: torch's, and those of every library that is loaded.

    A library that is not loaded has no module in any model, and may be slow to load.
    """
    return dict(layers.SWAPS) | _registered("SWAPS")


def branches() -> dict[type[nn.Module], tuple[tuple[str, ...], ...]]:
    """Stock block types -> their residual branches, of every library that is loaded."""
    return _registered("BRANCHES")


def _registered(name: str) -> dict[type[nn.Module], Any]:
    found: dict[type[nn.Module], Any] = {}
    for library in layers.LIBRARIES:
        if library in sys.modules:
            found |= getattr(importlib.import_module(f"razorctl.layers.{library}"), name)
    return found
