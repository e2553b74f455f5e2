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

    The last layer is the classifier that the model's library names, else the last one in order.
    Raises UsageError if there is none.
    """
    get: Any = getattr(model, "get_classifier", None)
    classifier = get() if callable(get) else None
    layers: list[tuple[str, nn.Module]] = [
        (name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)
    ]
    if not layers:
        raise UsageError(f"{type(model).__name__} has no last layer to train; use method 'full'.")
    return next(((name, m) for name, m in reversed(layers) if m is classifier), layers[-1])


def find(model: nn.Module, part: str) -> frozenset[str]:
    """The names of the parameters to train for the `Method.part` `bias` or `head`.

    Raises UsageError if there are no biases but those of the head.
    """
    layer_name, layer = head(model)
    of_layer = {id(p) for p in layer.parameters()}
    last = {name for name, p in model.named_parameters() if id(p) in of_layer}
    if part == "head":
        return frozenset(last)
    biases = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    if not biases - last:
        raise UsageError(
            f"{type(model).__name__} has no biases before {layer_name}, its last layer; choose "
            "method 'head' or 'lora'."
        )
    return frozenset(biases | last)


def attach(model: nn.Module, trained: frozenset[str]) -> None:
    """Freezes all parameters but those of these names, until `detach`."""
    before = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in trained)
    setattr(model, MARK, before)


def detach(module: nn.Module) -> None:
    """Unfreezes the parameters that `attach` froze, if any."""
    if hasattr(module, MARK):
        for name in getattr(module, MARK):
            module.get_parameter(name).requires_grad_(True)
        delattr(module, MARK)
