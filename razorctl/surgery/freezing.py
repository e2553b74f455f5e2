"""Training of a part of a model: its biases (TinyTL-B, Cai et al., 2020; BitFit, 2021), or a head.

The head, the last layer with weights, is trained in both cases, since it is new. Frozen batch norms
normalize by their running statistics, and do not update them.
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.optimizer import layer_numbers

# The names of the parameters that were trainable, and of the norms whose statistics are held.
MARK = "razor_unfrozen"
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def head(model: nn.Module) -> tuple[str, nn.Module]:
    """The name of the last layer of a model, and the layer.

    It is the classifier that `get_classifier` returns, else the last layer in order. Raises
    UsageError if there is none.
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

    Raises UsageError if only the head has biases.
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


def freeze_weights(model: nn.Module, job: Job, part: str | None) -> None:
    """Freezes the weights of `model` that `Job.freeze` names.

    part: what the method trains, as `Recipe.part`. Raises UsageError for a pattern without a match,
    if no weight is left to train, for adapters, which freeze all weights themselves, and for a part
    of a detection model, whose new heads are more than its last layer.
    """
    if part and job.task == "detection":
        raise UsageError(
            "LoRA, biases and a head train a last layer, and detection models have heads after "
            "several layers; choose another method, or --freeze."
        )
    if job.freeze is None:
        return
    if part == "adapters":
        raise UsageError(
            "adapters (LoRA) freeze all other weights; leave --freeze out, or the adapters."
        )
    names = [name for name, _ in model.named_parameters()]
    if job.freeze.isdecimal():
        numbers = layer_numbers(model)
        frozen = {name for name in names if numbers[name] <= int(job.freeze)}
        most = f"it has {max(numbers.values()):,} layers above its input"
    else:
        frozen = set()
        for pattern in job.freeze.split(","):
            pattern = pattern.strip()
            matching = {
                n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")
            }
            if not matching:
                raise UsageError(
                    f"freeze {pattern!r} matches no weight of {job.model}, whose weights are named "
                    f"{names[0]}, {names[len(names) // 2]} and {names[-1]}; correct it."
                )
            frozen |= matching
        most = f"it has {len(names):,} weights"
    if len(frozen) == len(names):
        raise UsageError(
            f"freeze {job.freeze!r} leaves no weight of {job.model} to train ({most}); freeze less."
        )
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    hold_statistics(model)


def hold_statistics(model: nn.Module) -> tuple[str, ...]:
    """Holds frozen batch norms in eval mode, whatever mode their model is in.

    A norm is frozen if its weight is. Without a weight, it is frozen if all parameters of the
    module around it are. Returns the names of the norms that were not held before.
    """
    held = []
    for name, module in model.named_modules():
        if not _has_statistics(module) or "train" in vars(module):
            continue
        around = model.get_submodule(name.rpartition(".")[0])
        weights = around.parameters() if module.weight is None else [module.weight]
        if not any(weight.requires_grad for weight in weights):
            module.eval()
            vars(module)["train"] = partial(_held, module)
            held.append(name)
    return tuple(held)


def release_statistics(model: nn.Module, held: tuple[str, ...]) -> None:
    """Lets the named batch norms follow the mode of their model again."""
    for name in held:
        module = model.get_submodule(name)
        del vars(module)["train"]
        module.train(model.training)


def _has_statistics(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return norm and module.running_mean is not None


def _held(module: nn.Module, mode: bool = True) -> nn.Module:
    """A `train` method that does not change the mode."""
    return module


def attach(model: nn.Module, trained: frozenset[str]) -> None:
    """Freezes all parameters except the named ones, until `detach`."""
    before = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in trained)
    setattr(model, MARK, (before, hold_statistics(model)))


def detach(module: nn.Module) -> None:
    """Unfreezes the parameters that `attach` froze, if any."""
    if hasattr(module, MARK):
        before, held = getattr(module, MARK)
        for name in before:
            module.get_parameter(name).requires_grad_(True)
        release_statistics(module, held)
        delattr(module, MARK)
