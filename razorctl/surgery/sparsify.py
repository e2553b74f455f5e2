"""`sparsify`, which puts razor layers into a model, and `restore`, which takes them out again."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from razorctl import units
from razorctl.config import registry
from razorctl.errors import UsageError
from razorctl.layers.attention import Attention
from razorctl.layers.attention_again import AttentionAgain
from razorctl.layers.base import LayerSettings, RazorLayer, WeightLayer, stock_type
from razorctl.layers.head import Head, heads
from razorctl.layers.pixel_head import PixelHead, pixel_classifiers
from razorctl.layers.recognition import razor_for
from razorctl.layers.registry import linear_types
from razorctl.layers.sharing import Memo
from razorctl.methods import METHODS
from razorctl.recipe import Recipe
from razorctl.rules.allocation import Names, largest
from razorctl.rules.base import Rules
from razorctl.rules.prune import Centered
from razorctl.rules.registry import RuleSettings, build
from razorctl.sampling.joint import Blocks
from razorctl.surgery import (
    adapters,
    branches,
    checkpointing,
    drawing,
    freezing,
    reruns,
    residuals,
    torchao,
    views,
)

log = logging.getLogger(__name__)

# Leaves that keep nothing worth pruning; containers are leaves if they are empty, as in PEFT.
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
MUCH = 0.2  # share of a model from which on a warning says that it stays stock
RECIPE = "razor_recipe"  # where a sparsified model has its recipe


@dataclass(frozen=True)
class Swap:
    """A module to be swapped, the class that it gets, and its rules."""

    name: str
    module: nn.Module
    razor: type[RazorLayer]
    rules: Rules | None


def sparsify(model: nn.Module, recipe: Recipe | None = None) -> tuple[str, ...]:
    """Swaps the layers of `model` that the recipe prunes, in place, by class.

    Parameters, buffers, state dict, hooks and optimizers stay valid; `restore` undoes it. A module
    is swapped only if its type is exactly a known stock type, because a subclass may compute
    something else, or if an example shows what it computes (`layers.recognition`). Other modules
    stay stock and are logged. Warnings name unknown attention, and
    layers that are likely to exceed a byte budget; `sparsify_within`, which traces
    inputs, runs such blocks again in the backward pass. Everything is checked before the first
    change. Returns the names of the modules whose activation checkpointing was switched on, of
    those that got adapters, and of the swapped ones; none for method `full`. Raises UsageError if
    the model is sparsified already, if it cannot honor the recipe, or if nothing in it can be
    swapped.
    """
    recipe = recipe or Recipe()
    names = swap(model, recipe)
    log_stock(model, recipe)
    _doubt(model, recipe)
    return names


def swap(model: nn.Module, recipe: Recipe, some: bool = True) -> tuple[str, ...]:
    """`sparsify` without its messages in the log; some: whether it needs a layer that it knows."""
    method = METHODS[recipe.method]
    refuse_sparsified(model)
    chosen = _choose(model, recipe)
    prunable = any(new.razor.kind in recipe.rules for new in chosen)
    if some and recipe.prunes and method.prunes and not prunable:
        raise UsageError(
            f"no layer of {type(model).__name__} can be pruned by {method.name!r}, which swaps "
            f"{', '.join(sorted(recipe.rules))} layers; use method 'full'."
        )
    blocks, residual = None, list[branches.Branch]()
    if recipe.joint_budget < 1:
        if recipe.joint == "branches":
            residual = branches.find(model)
            size, what = len(residual), "residual branch that is known and trainable"
        else:
            size, what = sum(map(_drawn, chosen)), "trainable weight to draw"
        if not size:
            raise UsageError(f"{type(model).__name__} has no {what}; set joint_budget to 1.")
        kinds = [branch.kind for branch in residual]
        blocks = Blocks(size, recipe.joint_budget, recipe.scaled, recipe.seed, kinds)
    checkpointed = checkpointing.find(model) if recipe.checkpoints else {}
    linear = adapters.find(model) if recipe.part == "adapters" else ()
    trained = freezing.find(model, recipe.part) if recipe.part in ("bias", "head") else None
    foreign = torchao.find(model) if method.torchao else {}

    if linear:
        adapters.attach(model, linear)
        chosen = _choose(model, recipe)  # with the adapters' own layers
    drawn = blocks if recipe.joint == "weights" else None
    derives = any(rule.again for new in chosen if new.rules for rule in new.rules.each)
    rules_of = partial(_rules_of_kind, recipe)
    settings = LayerSettings(Memo(derives), drawn, recipe.backend, *recipe.int8, rules_of)
    for new in chosen:
        new.razor.attach(new.module, new.rules, settings)
        new.module.place = new.name  # type: ignore[assignment]
    if not residual:  # a branch that is not drawn has no gradient to add
        for block, connections in residuals.find(model).items():
            residuals.attach(block, connections)
    if "linear" in recipe.rules:
        for stock in views.find(model):
            views.attach(stock)
    for module in checkpointed.values():
        checkpointing.attach(module)
    for module in foreign.values():
        torchao.attach(module)
    if trained is not None:
        freezing.attach(model, trained)
    if blocks is not None:
        for branch in residual:
            branch.attach(blocks)
        drawing.attach(model, blocks)
    setattr(model, RECIPE, recipe)
    return *checkpointed, *linear[:-1], *foreign, *(new.name for new in chosen)


def refuse_sparsified(model: nn.Module) -> None:
    """Raises UsageError for a model that `sparsify` has changed."""
    if sparsified(model):
        raise UsageError("the model is sparsified already; call razorctl.restore(model) first.")


def sparsified(model: nn.Module) -> bool:
    """Whether `sparsify` has changed a model; by method `full` it does not."""
    return any(map(_changed, model.modules()))


def _changed(module: nn.Module) -> bool:
    """Whether `sparsify` has changed this very module."""
    parts = (
        adapters,
        branches,
        checkpointing,
        drawing,
        freezing,
        reruns,
        residuals,
        torchao,
        views,
    )
    return isinstance(module, RazorLayer) or any(part.attached(module) for part in parts)


def _drawn(new: Swap) -> bool:
    """Whether a joint budget draws the weight of a module."""
    return issubclass(new.razor, WeightLayer) and new.razor.drawable(new.module)


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe that a model is sparsified by, None for one that is not."""
    recipe: Recipe | None = getattr(model, RECIPE, None)
    return recipe


def restore(model: nn.Module) -> None:
    """Makes every razor layer of `model` its stock class again, with the same parameters.

    Adapters are merged into the weights that they stand beside.
    """
    for module in list(model.modules()):
        vars(module).pop(RECIPE, None)
        reruns.detach(module)  # they run the others' forwards
        adapters.detach(module)
        freezing.detach(module)
        checkpointing.detach(module)
        branches.detach(module)
        drawing.detach(module)
        residuals.detach(module)
        torchao.detach(module)
        views.detach(module)
        if isinstance(module, RazorLayer):
            module.detach()


def _choose(model: nn.Module, recipe: Recipe) -> list[Swap]:
    """The swaps of a recipe; raises UsageError if attention cannot run on its backend."""
    if recipe.backend == "sparse-flash" and "attention" not in recipe.rules:
        raise UsageError(
            f"method {recipe.method!r} at ratio {recipe.ratio:g} prunes no q, k, v for "
            "sparse-flash; choose attention 'flash'."
        )
    chosen, inside = list[Swap](), set[nn.Module]()
    for name, module, razor in _candidates(model, recipe):
        if module in inside:
            continue
        rules = None
        if razor.kind in recipe.rules:
            rules = _rules(module, razor, recipe)
            if not all(razor.fits(module, rule) for rule in rules.each):
                continue
        if issubclass(razor, Attention):
            refusal = razor.refusal(module, recipe.attention)
            if refusal is not None:
                raise UsageError(f"{name or type(model).__name__} {refusal}")
            rules = None if recipe.backend == "flash" else rules
        chosen.append(Swap(name, module, razor, rules))
        if razor.covers(module):
            inside.update(module.modules())
    if recipe.attention != "auto":
        _check_attention(model, recipe, chosen)
    return chosen


def _candidates(
    model: nn.Module, recipe: Recipe
) -> Iterator[tuple[str, nn.Module, type[RazorLayer]]]:
    """The names, modules and razor classes of the kinds that a recipe or a backend changes."""
    kinds = set(recipe.rules)
    if recipe.backend != "auto":
        kinds.add(Attention.kind)
    head_types: dict[nn.Module, type[RazorLayer]] = {
        **dict.fromkeys(heads(model), Head),
        **dict.fromkeys(pixel_classifiers(model), PixelHead),
    }
    types = linear_types()
    linear = [module for module in model.modules() if stock_type(module) in types]
    # A model's last linear layer is its classifier: small, and its output is what is learned.
    skips = METHODS[recipe.method].skip_last_linear and len(linear) > 1
    skipped = linear[-1] if skips and linear[-1] not in head_types else None
    again = recipe.backend == "sparse-flash" and Attention.kind in recipe.rules
    for name, module in model.named_modules():
        razor = razor_for(module, again)
        if "head" in kinds:
            razor = head_types.get(module, razor)
        if razor is not None and razor.kind in kinds and module is not skipped:
            yield name, module, razor


def _check_attention(model: nn.Module, recipe: Recipe, chosen: Iterable[Swap]) -> None:
    """Raises UsageError if some attention of a model cannot be switched to another backend."""
    swapped = {swap.module for swap in chosen if swap.razor.kind == Attention.kind}
    strange = _unknown_attention(model, swapped)
    if strange or not swapped:
        first = next(iter(strange), "") or type(model).__name__
        what = f"{first} is" if strange else f"{first} has"
        raise UsageError(
            f"{what} no attention that can be switched to {recipe.attention!r}; "
            "choose attention 'auto'."
        )


def _rules(module: nn.Module, razor: type[RazorLayer], recipe: Recipe) -> Rules:
    """The rules of a recipe for a module that `razor` is to take over."""
    names = recipe.rules.get(razor.rule_kind(module), recipe.rules[razor.kind])
    return _built(recipe, names, razor.columns(module))


def _rules_of_kind(recipe: Recipe, kind: str, columns: int) -> Rules | None:
    """The rules of a recipe for a part of a module, None if that kind stays stock."""
    return _built(recipe, recipe.rules[kind], columns) if kind in recipe.rules else None


def _built(recipe: Recipe, names: Names, columns: int) -> Rules:
    """The rules of a recipe by their names."""
    rules = build(names, RuleSettings(columns, 1 - recipe.ratio, recipe.scaled))
    if recipe.mean_correction and rules.wide.prunes:
        centered = Centered(rules.wide)
        return Rules(centered, centered)
    return rules


def _unknown_attention(model: nn.Module, swapped: set[nn.Module]) -> dict[str, nn.Module]:
    """Modules that call themselves attention and neither are swapped nor hold one that is."""
    return {
        name: module
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__ and swapped.isdisjoint(module.modules())
    }


def log_stock(model: nn.Module, recipe: Recipe) -> None:
    """Logs which modules of a sparsified model have stayed stock."""
    if not recipe.prunes:
        return
    again = _running_again(model)
    leaves = {
        name: module
        for name, module in model.named_modules()
        if module not in again
        and not isinstance(module, (RazorLayer, *LIGHT))
        and not any(module.children())
    }
    if leaves:
        log.info("stock, so kept in full: %s", _grouped(leaves))
    if "attention" in recipe.rules and (
        strange := {n: m for n, m in _strange_attention(model).items() if m not in again}
    ):
        log.warning("unknown attention, so stock and kept in full: %s", _grouped(strange))


def _running_again(model: nn.Module) -> set[nn.Module]:
    """The modules that run again in the backward pass, with all inside them."""
    wholes = (
        module
        for module in model.modules()
        if reruns.attached(module) or (isinstance(module, RazorLayer) and module.covers(module))
    )
    return {part for whole in wholes for part in whole.modules()}


def _strange_attention(model: nn.Module) -> dict[str, nn.Module]:
    """The unknown attention of a sparsified model, by name."""
    known = Attention, AttentionAgain
    return _unknown_attention(model, {m for m in model.modules() if isinstance(m, known)})


def _grouped(modules: Mapping[str, nn.Module]) -> str:
    """Modules as text, by name with their classes; names that differ in numbers alone are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, module in modules.items():
        kind = stock_type(module).__name__
        groups.setdefault((registry.starred(name), kind), []).append(name or "the model")
    return ", ".join(
        f"{len(names)} x {stars} ({kind})" if names[1:] else f"{names[0]} ({kind})"
        for (stars, kind), names in groups.items()
    )


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has trainable weights of its own: `weight`, or matrices of other names."""
    own = module._parameters
    return any(
        p is not None and p.requires_grad and (name == "weight" or (p.dim() > 1 and len(p) > 1))
        for name, p in own.items()
    )


def _doubt(model: nn.Module, recipe: Recipe) -> None:
    """Warns if a model is likely to exceed its byte budget, which only a trace of inputs shows.

    It is likely if the share of its layers with weights that are of unknown kinds, and so kept in
    full, is larger than 1 - ratio. Each unknown attention counts as one such layer. It is likely
    too if most of the layers are convolutions, whose inputs are not made again. Warns in other
    words if MUCH of the layers or of their weights stays stock at any ratio.
    """
    if not recipe.has_byte_budget:
        return
    attention = set(_strange_attention(model).values()) if "attention" in recipe.rules else set()
    again = _running_again(model)
    weighted = [
        m for m in model.modules() if not isinstance(m, LIGHT) and m not in again and _multiplies(m)
    ]
    alone = [m for m in weighted if not isinstance(m, RazorLayer) and razor_for(m) is None]
    unknown = attention.union(alone)
    strange = [m for m in model.modules() if m in unknown]
    of_layers = len(strange) / max(1, len(attention.union(weighted)))
    share = max(of_layers, _weights(alone) / max(1, _weights(weighted)))
    count = Counter(m.kind for m in weighted if isinstance(m, WeightLayer))
    kinds = Counter(stock_type(module).__name__ for module in strange)
    names = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
    allowed = f"the {units.percent(1 - recipe.ratio)} that ratio {recipe.ratio:g} allows"
    likely = f"is likely to keep more for backward than {allowed}, since"
    if of_layers > 1 - recipe.ratio:
        what = f"{likely} it has layers that are not compressed: {names}"
    elif count["conv"] > count["linear"] and recipe.ratio > largest("convolution"):
        what = (
            f"{likely} {count['conv']} layers are convolutions, whose inputs are kept in 2 bits at "
            "least"
        )
    elif share >= MUCH:
        what = f"stays stock in about {units.percent(share)} of its layers or weights: {names}"
    else:
        return
    log.warning(
        "%s %s; razorctl.saved_bytes(model, inputs) says how much it keeps, and "
        "razorctl.sparsify_within keeps less, where that can mend it.",
        stock_type(model).__name__,
        what,
    )


def _weights(modules: Iterable[nn.Module]) -> int:
    """The number of weights of modules, without those inside them."""
    return sum(p.numel() for m in modules for p in m._parameters.values() if p is not None)
