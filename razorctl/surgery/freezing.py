"""Training of a part of a model: its biases (TinyTL-B, Cai et al., 2020; BitFit, 2021), or a head.

The head, the last layer with weights, is trained in both cases, as it is fresh.
"""

from typing import Any

from torch import nn

from razorctl.errors import UsageError

MARK = "razor_unfrozen"  # the names of the parameters that were trainable before
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def head(model: nn.Module) -> tuple[str, nn.Module]:
    """The name of the last layer of a model, and the layer.

    That is the one that its library names as its classifier, else the last one in order. Raises
    UsageError if there is none.
    """
    named: Any = getattr(model, "get_classifier", None)
    own = named() if callable(named) else None
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
    of_library = [(name, m) for name, m in layers if m is own]
    found = (of_library or layers)[-1:]
    if not found:
        raise UsageError(f"{type(model).__name__} has no last layer to train; use method 'full'.")
    return found[0]


def find(model: nn.Module, part: str) -> frozenset[str]:
    """The names of the parameters to train, of a `Method.part` that is `bias` or `head`.

    Raises UsageError if there are no biases but those of the head.
    """
    name, layer = head(model)
    kept = {id(p) for p in layer.parameters()}
    last = {own for own, p in model.named_parameters() if id(p) in kept}
    if part == "head":
        return frozenset(last)
    biases = {own for own, _ in model.named_parameters() if own.rpartition(".")[2] == "bias"}
    if not biases - last:
        raise UsageError(
            f"{type(model).__name__} has no biases before {name}, its last layer; choose method "
            "'head' or 'lora'."
        )
    return frozenset(biases | last)


def attach(model: nn.Module, trained: frozenset[str]) -> None:
    """Freezes all parameters but those of these names, until `detach`."""
    before = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in trained)
    setattr(model, MARK, before)


def attached(module: nn.Module) -> bool:
    """Whether `attach` was given this very module."""
    return hasattr(module, MARK)


def detach(module: nn.Module) -> None:
    """Makes trainable again what `attach` froze, if anything."""
    if attached(module):
        for name in getattr(module, MARK):
            module.get_parameter(name).requires_grad_(True)
        delattr(module, MARK)
