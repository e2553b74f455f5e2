"""How a library's models are built, fed and swapped: a file a library, found by listing.

A family file has the name of its library and defines `MODELS`, a tuple of `Model` entries; `SWAPS`,
as a layer file does, for the library's own layers; and `BRANCHES`, which maps its exact block types
to the residual branches in them: the names of the modules that save something, the last of which
gives the branch's output.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from razorctl import layers, registry
from razorctl.layers import RazorLayer

Rows = dict[str, list[Any]]


def _absent(*_: Any) -> Any:
    raise NotImplementedError


@dataclass(frozen=True)
class Model:
    """A pretrained model by name.

    build: number of classes -> the pretrained model with a fresh classifier.
    transform: model -> a function from data set rows to {"inputs": [...], "labels": [...]}.
    logits: (model, batched inputs) -> logits [batch, classes].
    defaults: measured settings, by their field of `Job`.
    bare: (number of classes, input size or None for the usual one) -> the architecture with fresh
    weights, from no file.
    example: (model, batch size, input size or None) -> a batch of the right shapes.
    """

    name: str
    summary: str
    build: Callable[[int], nn.Module]
    transform: Callable[[nn.Module], Callable[[Rows], Rows]]
    logits: Callable[[nn.Module, Any], Tensor]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bare: Callable[[int, int | None], nn.Module] = field(default=_absent, kw_only=True)
    example: Callable[[nn.Module, int, int | None], Any] = field(default=_absent, kw_only=True)


@cache
def models() -> dict[str, Model]:
    """Every model by name."""
    files = registry.modules(__name__, __path__)
    return {model.name: model for file in files for model in file.MODELS}


def find(name: str) -> Model:
    """The model of that name; raises UsageError with the nearest one if there is none."""
    return registry.find("model", name, models())


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
    for file in pkgutil.iter_modules(__path__):
        if file.name in sys.modules:
            found |= getattr(importlib.import_module(f"{__name__}.{file.name}"), name)
    return found
