"""Models by name: a file a library, found by listing.

A family file defines `MODELS`, a tuple of `Model` entries. It imports its library where it builds
and feeds a model, not before: what is known of a model takes no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from razorctl.config import registry

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    defaults: settings by their field of `Job`; learning rate and weight decay, which suit one
        optimizer alone, stand in a mapping under its name.
    """

    name: str
    summary: str
    modality: Modality
    build: Callable[[int, int | None], "nn.Module"]
    bare: Callable[[int, int | None], "nn.Module"]
    transform: Callable[["nn.Module", int | None], Callable[[Rows], Rows]]
    example: Callable[["nn.Module", int, int | None], Any]
    logits: Callable[["nn.Module", Any], "Tensor"]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_MODELS: dict[str, Model] = {
    model.name: model for file in registry.modules(__name__, __path__) for model in file.MODELS
}


def models() -> dict[str, Model]:
    """Every model by name."""
    return _MODELS


def find(name: str) -> Model:
    """The model of that name; raises UsageError with the nearest one if there is none."""
    return registry.find("model", name, _MODELS)
