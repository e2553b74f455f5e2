"""How models are built and fed: a file a library, found by listing.

A family file defines `MODELS`, a tuple of `Model` entries.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from razorctl.errors import unknown

Rows = dict[str, list[Any]]


@dataclass(frozen=True)
class Model:
    """A pretrained model by name.

    build: number of classes -> the pretrained model with a fresh classifier.
    transform: model -> a function from data set rows to {"inputs": [...], "labels": [...]}.
    logits: (model, batched inputs) -> logits [batch, classes].
    defaults: measured settings, by their field of `Job`.
    """

    name: str
    summary: str
    build: Callable[[int], nn.Module]
    transform: Callable[[nn.Module], Callable[[Rows], Rows]]
    logits: Callable[[nn.Module, Any], Tensor]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _discover() -> dict[str, Model]:
    files = [
        importlib.import_module(f"{__name__}.{f.name}") for f in pkgutil.iter_modules(__path__)
    ]
    return {model.name: model for file in files for model in file.MODELS}


MODELS = _discover()


def find(name: str) -> Model:
    """The model of that name; raises UsageError with the nearest one if there is none."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]
