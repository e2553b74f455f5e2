"""Messages about the modules of a sparsified model that stay stock."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from razorctl import registry, units
from razorctl.config.recipe import Recipe
from razorctl.layers import known_forwards
from razorctl.layers.attention.stored import Attention
from razorctl.layers.base import RazorLayer, WeightLayer, stock_type
from razorctl.layers.by_type import razor_of
from razorctl.layers.own_forward import place
from razorctl.layers.recognition.razor_class import razor_for
from razorctl.layers.recompute.attention import AttentionAgain, attends, is_attention
from razorctl.rules.allocation import closest, largest
from razorctl.surgery import reruns

log = logging.getLogger(__name__)

# Leaves that store nothing worth pruning. Empty containers, as PEFT has them, are leaves too.
LIGHT = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Embedding,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ParameterDict,
    nn.ParameterList,
)
MUCH = 0.2  # share of a model's layers or weights, from which on a warning says it stays stock


def unknown_attention(model: nn.Module, swapped: set[nn.Module]) -> dict[str, nn.Module]:
    """Modules named attention that are not swapped, and do not contain a swapped one."""
    return {
        name: module
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        and swapped.isdisjoint(module.modules())
        and attends(module)
    }


def log_stock(model: nn.Module, recipe: Recipe) -> None:
    """Logs which modules of a sparsified model have stayed stock."""
    if not recipe.prunes:
        return
    if unlike := ", ".join(known_forwards.changed(map(stock_type, model.modules()))):
        what = "another release or a patch has changed forwards that razorctl reimplements"
        log.warning("%s, so these stay stock or run as unknown code: %s", what, unlike)
    named = dict(model.named_modules()).items()
    own = {n: m for n, m in named if not place(m) and razor_of(stock_type(m)) is not None}
    if own:
        log.warning("not compressed, as instances have their own forward: %s", _grouped(own))
    again = _running_again(model)
    leaves = {
        name: module
        for name, module in model.named_modules()
        if module not in again
        and not isinstance(module, (RazorLayer, *LIGHT))
        and not module._modules
    }
    if leaves:
        log.info("stock, so stored in full: %s", _grouped(leaves))
    if "attention" in recipe.rules and (
        strange := {n: m for n, m in _strange_attention(model, recipe).items() if m not in again}
    ):
        log.warning("unknown attention, so stock and stored in full: %s", _grouped(strange))


def _running_again(model: nn.Module) -> set[nn.Module]:
    """The modules that are recomputed in the backward pass, with all submodules."""
    wholes = (
        module
        for module in model.modules()
        if reruns.attached(module) or (isinstance(module, RazorLayer) and module.covers(module))
    )
    return {part for whole in wholes for part in whole.modules()}


def _strange_attention(model: nn.Module, recipe: Recipe) -> dict[str, nn.Module]:
    """The unknown attention of a sparsified model by name, unless the recipe leaves it stock."""

    def is_ours(module: nn.Module) -> bool:
        kind: Any = stock_type(module)  # mypy takes it for unhashable
        ours = isinstance(module, (Attention, AttentionAgain))
        return ours or (recipe.is_loose and is_attention(kind))

    return unknown_attention(model, set(filter(is_ours, model.modules())))


def _grouped(modules: Mapping[str, nn.Module]) -> str:
    """Modules as text, by name and class; names that differ only in numbers are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, module in modules.items():
        kind = stock_type(module).__name__
        groups.setdefault((registry.starred(name), kind), []).append(name or "the model")
    return ", ".join(
        f"{len(names)} x {stars} ({kind})" if names[1:] else f"{names[0]} ({kind})"
        for (stars, kind), names in groups.items()
    )


def _multiplies(module: nn.Module) -> bool:
    """Whether a module itself holds trainable weights: `weight`, or matrices by other names."""
    own = module._parameters
    return any(
        p is not None and p.requires_grad and (name == "weight" or (p.dim() > 1 and len(p) > 1))
        for name, p in own.items()
    )


def _own_code(model: nn.Module) -> set[nn.Module]:
    """The modules in repeated blocks that hold vectors themselves, beside plain layers.

    For example mixers of state-space models: the code between the layers uses the vectors, and
    stores more than the layers do.
    """
    places = Counter(registry.starred(name) for name, _ in model.named_modules())
    return {
        module
        for name, module in model.named_modules()
        if places[registry.starred(name)] > 1
        and not isinstance(module, RazorLayer)
        and module._modules
        and not any(child._modules for child in module.children())
        and any(
            p is not None and p.requires_grad and p.dim() == 1 and len(p) > 1
            for p in module._parameters.values()
        )
    }


def warn_of_excess(model: nn.Module, recipe: Recipe) -> bool:
    """Warns if a model is likely to exceed its byte budget; returns whether it warned.

    That is likely if the share of its layers with weights that stay stock is larger than 1 - ratio.
    An unknown attention counts as one such layer; so does a module of `_own_code`, with each of its
    layers. It is likely, too, if most layers are convolutions, whose inputs are not recomputed. A
    different warning says that MUCH of the layers or weights stays stock, at any ratio.
    """
    strangers = _strange_attention(model, recipe) if "attention" in recipe.rules else {}
    attention = set(strangers.values())
    again = _running_again(model)
    weighted = [
        m for m in model.modules() if not isinstance(m, LIGHT) and m not in again and _multiplies(m)
    ]
    alone = [m for m in weighted if not isinstance(m, RazorLayer) and razor_for(m) is None]
    own = _own_code(model) - again
    unknown = attention.union(alone, own)
    strange = [m for m in model.modules() if m in unknown]
    inside = set(weighted) & {part for module in own for part in module.modules()}
    every = attention.union(weighted, own)
    of_layers = len(unknown | inside) / max(1, len(every))
    share = max(of_layers, _weights(alone) / max(1, _weights(weighted)))
    count = Counter(m.kind for m in weighted if isinstance(m, WeightLayer))
    kinds = Counter(stock_type(module).__name__ for module in strange)
    names = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
    allowed = f"the {units.percent(1 - recipe.ratio)} that ratio {recipe.ratio:g} allows"
    likely = f"is likely to store more for backward than {allowed}, since"
    if of_layers > 1 - recipe.ratio:
        what = f"{likely} it has layers that are not compressed: {names}"
    elif count["conv"] > count["linear"] and recipe.ratio > largest("convolution"):
        what = (
            f"{likely} {count['conv']} layers are convolutions, whose inputs are stored in at "
            "least 2 bits; the gradient is close to the exact one only at ratios up to "
            f"{closest('convolution', 'wide'):g} in single and "
            f"{closest('convolution', 'narrow'):g} in half precision"
        )
    elif share >= MUCH:
        what = f"stays stock in about {units.percent(share)} of its layers or weights: {names}"
    else:
        return False
    log.warning(
        "%s %s; razorctl.saved_bytes(model, inputs) returns the stored bytes, and "
        "razorctl.sparsify_within may store less.",
        stock_type(model).__name__,
        what,
    )
    return True


def _weights(modules: Iterable[nn.Module]) -> int:
    """The number of weights that these modules hold themselves."""
    return sum(p.numel() for m in modules for p in m._parameters.values() if p is not None)
