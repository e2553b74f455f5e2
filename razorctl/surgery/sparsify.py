"""`sparsify` puts razor layers into a model, `restore` takes them out again."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from razorctl.config.keywords import RecipeSettings
from razorctl.config.recipe import Recipe
from razorctl.errors import ArgumentTypeError, UsageError
from razorctl.layers import own_forward
from razorctl.layers.attention.stored import Attention
from razorctl.layers.base import LayerSettings, RazorLayer, WeightLayer
from razorctl.layers.heads.outputs import Outputs
from razorctl.layers.heads.pixel_logits import PixelHead, pixel_classifiers
from razorctl.layers.heads.tied_embeddings import TiedEmbedding, tied_embeddings
from razorctl.layers.heads.token_logits import Head, heads
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.recognition.razor_class import razor_for
from razorctl.layers.shared_copies.memo import Memo
from razorctl.memory.fake import mode_of
from razorctl.memory.saved import Forward, bytes_by_module, on_copies, storages_by_module
from razorctl.methods import METHODS
from razorctl.registry import unknown
from razorctl.rules.allocation import Names
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
    outputs,
    residuals,
    torchao,
    views,
)
from razorctl.surgery.excess import note_excess
from razorctl.surgery.stock_modules import log_stock, unknown_attention, warn_of_excess

log = logging.getLogger(__name__)

FAR = 1.25  # times a byte budget, from which on the first pass warns
RECIPE = "razor_recipe"  # the attribute of a sparsified model that holds its recipe


@dataclass(frozen=True)
class Swap:
    """A module to swap, its razor class, and its rules."""

    name: str
    module: nn.Module
    razor: type[RazorLayer]
    rules: Rules | None


def sparsify(
    model: nn.Module, recipe: Recipe | str | None = None, **settings: Unpack[RecipeSettings]
) -> tuple[str, ...]:
    """Swaps the layers of `model` that the recipe prunes, in place, by class.

        razorctl.sparsify(model, "razor", ratio=0.9)

    recipe: a Recipe, or the name of a method; None is razor. settings: fields of the recipe.

    Parameters, buffers, state dict, hooks and optimizers stay valid; `restore` undoes it. A module
    is swapped only if its type is exactly a known stock type, because a subclass may compute
    something else, or if an example shows what it computes (`layers.recognition`). Other modules
    stay stock and are logged. Warnings name unknown attention, and layers that are likely to exceed
    a byte budget. Without such a warning the first training pass is traced, and warns if it exceeds
    the budget by FAR. `sparsify_within` traces inputs, and recomputes such blocks. Everything is
    checked before the first change.

    Returns the names of the modules whose activation checkpointing was switched on, then of the
    ones that got adapters, then of the swapped ones; none for method `full`. Raises UsageError if
    the model is sparsified already, if it cannot honor the recipe, or if it has nothing to swap.
    """
    recipe = _recipe(recipe, settings)
    if recipe.has_byte_budget and not recipe.activation_checkpointing:
        checkpointing.advise(model)
    names = swap(model, recipe)
    log_stock(model, recipe)
    if recipe.has_byte_budget and not warn_of_excess(model, recipe):
        model.register_forward_pre_hook(tell_excess, with_kwargs=True)
    return names


def _recipe(recipe: Recipe | str | None, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a Recipe or the name of a method, with settings that are not None."""
    if not isinstance(recipe, Recipe | str | None):
        kind = type(recipe).__name__
        raise ArgumentTypeError(f"recipe cannot be a {kind}; give a Recipe or a method's name.")
    names = [field.name for field in fields(Recipe)]
    for name in settings:
        if name not in names:
            raise unknown("setting of a recipe", name, names)
    given = {name: value for name, value in settings.items() if value is not None}
    plain = recipe if isinstance(recipe, Recipe) else Recipe(recipe or Recipe.method)
    return replace(plain, **given)


def tell_excess(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warns in the first training pass if its inputs far exceed the byte budget.

    The pass is traced on fake copies, without the user's hooks, and does not change the model. A
    model that reads values cannot be traced so; the log says that it is not compared.
    """
    if not outputs.trains(model) or mode_of(model.parameters()) is not None:
        return
    recipe, device = recipe_of(model), next(model.parameters()).device.type
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    drawing.unhook(model, tell_excess)
    run: dict[str, Any] = {
        "autocast": torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        "forward": lambda twin, call: twin(*call[0], **call[1]),
    }

    def both(twin: nn.Module, call: Any) -> tuple[dict[str, int], dict[str, int]]:
        drawing.unhook_strangers(twin)
        parts = bytes_by_module(storages_by_module(twin, call, **run))
        return parts, _stock_parts(twin, call, **run)

    try:
        with saved_tensors_hooks(_same, _same):
            parts, stock = on_copies(both, model, (args, kwargs), real=False)
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {error}"
        log.info(
            "the stored bytes are not checked against the byte budget: tracing raises %s", reason
        )
        return
    if recipe and sum(parts.values()) > FAR * (1 - recipe.ratio) * sum(stock.values()):
        note_excess(model, recipe, parts, stock)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def stock_parts(model: nn.Module, inputs: Any, **run: Any) -> dict[str, int]:
    """Module name -> the bytes that full stores: the stock model without any checkpointing.

    The arguments are as in `saved_bytes`.
    """

    return on_copies(partial(_stock_parts, **run), model, inputs)


def _stock_parts(
    twin: nn.Module,
    inputs: Any,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> dict[str, int]:
    """`stock_parts` of a copy, which is left stock."""
    restore(twin)
    checkpointing.leave_out(twin)
    return bytes_by_module(storages_by_module(twin, inputs, autocast, forward))


def swap(
    model: nn.Module, recipe: Recipe, some: bool = True, known: Outputs | None = None
) -> tuple[str, ...]:
    """`sparsify` without its messages about stock layers.

    some: whether to raise if no layer can be swapped. known: the output layers, if traced.
    """
    method = METHODS[recipe.method]
    refuse_sparsified(model)
    exact = outputs.guess(model, known) if method.skips_outputs else frozenset()
    every = _choose(model, recipe)
    left = [new for new in every if new.name in exact and new.razor.kind == Linear.kind]
    chosen = [new for new in every if new not in left]
    prunable = any(new.razor.kind in recipe.rules for new in chosen)
    if some and recipe.prunes and method.prunes and not prunable:
        raise UsageError(
            f"no layer of {type(model).__name__} can be pruned by {method.name!r}, which swaps "
            f"{', '.join(sorted(recipe.rules))} layers; use method 'full'."
        )
    blocks, residual = _joint(model, recipe, chosen) if recipe.joint_budget < 1 else (None, [])
    checkpointed = checkpointing.find(model) if recipe.checkpoints else {}
    linear = adapters.find(model, recipe.lora_targets) if recipe.part == "adapters" else ()
    trained = freezing.find(model, recipe.part) if recipe.part in ("bias", "head") else None
    foreign = torchao.find(model) if method.torchao else {}

    if linear:
        adapters.attach(model, linear, recipe.lora_rank, recipe.lora_alpha)
        chosen = _choose(model, recipe)  # now with the linear layers inside adapters
    drawn = blocks if recipe.joint == "weights" else None
    derives = any(rule.again for new in chosen if new.rules for rule in new.rules.each)
    rules_of = partial(_rules_of_kind, recipe)
    memo = Memo(derives, measures=recipe.has_byte_budget)
    settings = LayerSettings(memo, drawn, recipe.backend, *recipe.int8, rules_of)
    for new in chosen:
        _take(new, settings)
    if exact:
        mend = {new.name: partial(_take, new, settings) for new in left if drawn is None}
        outputs.attach(model, outputs.Exact(exact, mend, known))
    if not residual:  # a branch that is not drawn has no gradient to add
        for block, connections in residuals.find(model).items():
            own_forward.put(block, residuals.Block(block, connections))
    if "linear" in recipe.rules:
        for stock in views.find(model):
            own_forward.put(stock, views.ViewLinear(stock))
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


def _joint(
    model: nn.Module, recipe: Recipe, chosen: Iterable[Swap]
) -> tuple[Blocks, list[branches.Branch]]:
    """The draw of a joint budget, and its branches; raises UsageError if it has no blocks."""
    residual = list[branches.Branch]()
    if recipe.joint == "branches":
        residual = branches.find(model)
        size, what = len(residual), "trainable residual branch that razorctl recognizes"
    else:
        size, what = sum(map(_drawn, chosen)), "trainable weight to sample"
    if not size:
        raise UsageError(f"{type(model).__name__} has no {what}; set joint_budget to 1.")
    kinds = [branch.kind for branch in residual]
    return Blocks(size, recipe.joint_budget, recipe.scaled, recipe.seed, kinds), residual


def _take(new: Swap, settings: LayerSettings) -> None:
    new.razor.attach(new.module, new.rules, settings)
    new.module.place = new.name  # type: ignore[assignment]


def refuse_sparsified(model: nn.Module) -> None:
    """Raises UsageError for a model that `sparsify` has changed."""
    if sparsified(model):
        raise UsageError("the model is sparsified already; call razorctl.restore(model) first.")


def sparsified(model: nn.Module) -> bool:
    """Whether `sparsify` has changed a model; method `full` changes none."""
    return any(map(_changed, model.modules()))


def _changed(module: nn.Module) -> bool:
    """Whether `sparsify` has changed this module itself."""
    marks = {part.MARK for part in (adapters, checkpointing, drawing, freezing, outputs)}
    ours = isinstance(module, RazorLayer) or own_forward.runs(module) or torchao.attached(module)
    return ours or not marks.isdisjoint(vars(module))


def _drawn(new: Swap) -> bool:
    """Whether a joint budget draws the weight of this module."""
    return issubclass(new.razor, WeightLayer) and new.razor.drawable(new.module)


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe that a model is sparsified by; None for a stock model."""
    recipe: Recipe | None = getattr(model, RECIPE, None)
    return recipe


def restore(model: nn.Module) -> None:
    """Gives every razor layer of `model` its stock class back, with the same parameters.

    Adapters are merged into the weights beside them.
    """
    for module in list(model.modules()):
        vars(module).pop(RECIPE, None)
        own_forward.take(module)
        adapters.detach(module)
        freezing.detach(module)
        outputs.detach(module)
        drawing.unhook(module, tell_excess)
        checkpointing.detach(module)
        drawing.detach(module)
        torchao.detach(module)
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
    """The names, modules and razor classes of the layer kinds that a recipe or backend changes."""
    kinds = set(recipe.rules)
    if recipe.backend != "auto":
        kinds.add(Attention.kind)
    head_types: dict[nn.Module, type[RazorLayer]] = {
        **dict.fromkeys(heads(model), Head),
        **dict.fromkeys(tied_embeddings(model, heads(model)), TiedEmbedding),
        **dict.fromkeys(pixel_classifiers(model), PixelHead),
    }
    again = recipe.runs_again
    for name, module in model.named_modules():
        razor = razor_for(module, again)
        if "head" in kinds:
            razor = head_types.get(module, razor)
        if razor is not None and razor.kind in kinds:
            yield name, module, razor


def _check_attention(model: nn.Module, recipe: Recipe, chosen: Iterable[Swap]) -> None:
    """Raises UsageError if a model has attention that cannot switch to another backend."""
    swapped = {swap.module for swap in chosen if swap.razor.kind == Attention.kind}
    strange = unknown_attention(model, swapped)
    if strange or not swapped:
        first = next(iter(strange), "") or type(model).__name__
        raise UsageError(
            f"{first} cannot run with attention {recipe.attention!r}; choose attention 'auto'."
        )


def _rules(module: nn.Module, razor: type[RazorLayer], recipe: Recipe) -> Rules:
    """The rules of a recipe for a module that `razor` will take over."""
    names = recipe.rules.get(razor.rule_kind(module), recipe.rules[razor.kind])
    return _built(recipe, names, razor.columns(module))


def _rules_of_kind(recipe: Recipe, kind: str, columns: int) -> Rules | None:
    """The rules of a recipe for a part of a module; None if that layer kind stays stock."""
    return _built(recipe, recipe.rules[kind], columns) if kind in recipe.rules else None


def _built(recipe: Recipe, names: Names, columns: int) -> Rules:
    """The rules of a recipe, by their names."""
    rules = build(names, RuleSettings(columns, 1 - recipe.ratio, recipe.scaled))
    if recipe.mean_correction and rules.wide.prunes:
        centered = Centered(rules.wide)
        return Rules(centered, centered)
    return rules
