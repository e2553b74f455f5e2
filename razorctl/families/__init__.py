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
from typing import Any, Literal

from torch import Tensor, nn

from razorctl import layers, registry
from razorctl.layers import RazorLayer

Rows = dict[str, list[Any]]
Modality = Literal["image", "text"]


@dataclass(frozen=True)
class Model:
    """A pretrained model by name.

    An input size is the pixels of an image's side, or the tokens of a text; None is the model's
    own, and one that the model cannot take is a UsageError.

    build: (classes, input size) -> the pretrained model with a fresh classifier. Raises
        MissingError or DataError where the weights cannot be had or read.
    bare: the same with fresh weights, from no file and no network.
    transform: (model, input size) -> a function from data set rows to {"inputs": [...],
        "labels": [...]}.
    example: (model, batch size, input size) -> inputs as a batch of transformed rows has them.
    logits: (model, batched inputs) -> logits [batch, classes].
    defaults: measured settings, by their field of `Job`.
    """

    name: str
    summary: str
    modality: Modality
    build: Callable[[int, int | None], nn.Module]
    bare: Callable[[int, int | None], nn.Module]
    transform: Callable[[nn.Module, int | None], Callable[[Rows], Rows]]
    example: Callable[[nn.Module, int, int | None], Any]
    logits: Callable[[nn.Module, Any], Tensor]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_unread = [file.name for file in pkgutil.iter_modules(__path__)]
_known: dict[str, Model] = {}


def _read() -> None:
    file = importlib.import_module(f"{__name__}.{_unread[0]}")
    _known.update({model.name: model for model in file.MODELS})
    del _unread[0]


def models() -> dict[str, Model]:
    """Every model by name."""
    while _unread:
        _read()
    return _known


def find(name: str) -> Model:
    """The model of that name; raises UsageError with the nearest one if there is none.

    Libraries are slow to load: those that come after the model's own are not.
    """
    while _unread and name not in _known:
        _read()
    return registry.find("model", name, _known)


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
