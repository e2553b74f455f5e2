"""How models are built and fed: a file a library, found by listing.

A family file defines `MODELS`, a tuple of `Model` entries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from razorctl import registry

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


MODELS: dict[str, Model] = {
    model.name: model for file in registry.modules(__name__, __path__) for model in file.MODELS
}


def find(name: str) -> Model:
    """The model of that name; raises UsageError with the nearest one if there is none."""
    return registry.find("model", name, MODELS)
