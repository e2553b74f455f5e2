"""The byte budget of `razor`: `sparsify_within` meets it, `saved_bytes` compares with it."""

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from razorctl import units
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.layers.base import stock_type
from razorctl.layers.heads.outputs import Outputs
from razorctl.memory.saved import (
    Forward,
    bytes_by_module,
    on_copies,
    storages_by_module,
    traced_bytes,
    traced_bytes_by_module,
)
from razorctl.methods import METHODS
from razorctl.surgery import checkpointing, drawing, outputs
from razorctl.surgery.budget_search import BudgetSearch, Reruns
from razorctl.surgery.excess import note_excess, uncompressed
from razorctl.surgery.sparsify import (
    RECIPE,
    recipe_of,
    refuse_sparsified,
    restore,
    stock_parts,
    swap,
    tell_excess,
)
from razorctl.surgery.stock_modules import log_stock

log = logging.getLogger(__name__)


def sparsify_within(
    model: nn.Module,
    recipe: Recipe,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
    full: int | None = None,
) -> tuple[str, ...]:
    """Sparsifies a model so that a step on `inputs` stores at most 1 - ratio of what full stores.

    `sparsify` chooses rules that meet the byte budget on the models that were measured. This
    function traces the model at hand. If it stores more, it gets rules of fewer bits, as far as
    these are close to the exact gradient. Convolutions need more bits for that than other layers;
    if their rules are not close, they get all that the budget leaves. If no such rules meet the
    budget, blocks are recomputed in the backward pass (`reruns`), as few as possible: from their
    inputs if that suffices or if the model reads values, else from copies in 16 bits or fewer. A
    block may be most of the model if it holds at most twice the budget while it is recomputed. A
    method without a byte budget is left to `sparsify`. Activation checkpointing changes no rule:
    the budget must be met with and without it. If that fails, checkpointing that the model itself
    has switched on counts.

    Returns the names of the recomputed modules, then of the swapped ones. Raises what `sparsify`
    raises, and UsageError with the largest possible ratio if this one cannot be met; the model is
    then unchanged.

    Args:
        model: a stock model.
        recipe: its ratio is the byte budget.
        inputs: of a step, as in `saved_bytes`.
        autocast: the dtype of a mixed-precision step, None for none.
        forward: as in `saved_bytes`.
        full: the bytes that a full step on `inputs` stores; None measures them.
    """
    run: dict[str, Any] = {"autocast": autocast, "forward": forward}
    if recipe.has_byte_budget and full is None:
        refuse_sparsified(model)
        full = sum(stock_parts(model, inputs, **run).values())
    return within(model, recipe, inputs, Full(full or 0), **run).names


class Full(NamedTuple):
    """The bytes that a full step stores, and the output layers that it shows, None if unknown."""

    bytes: int
    outputs: Outputs | None = None


class Within(NamedTuple):
    """A sparsified model.

    names: as `sparsify_within` returns them. parts: module name -> the bytes that it stores, where
    the search has traced them.
    """

    names: tuple[str, ...]
    parts: dict[str, int] | None


def full_step(
    model: nn.Module,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> Full:
    """Traces a step of a stock model; arguments and errors are as in `saved_bytes`."""

    def trace(twin: nn.Module, inputs: Any) -> Full:
        found = list[Outputs]()

        def run(twin: nn.Module, inputs: Any) -> Any:
            result, shown = outputs.run_and_find(twin, inputs, autocast, forward)
            found.append(shown)
            return result

        parts = bytes_by_module(storages_by_module(twin, inputs, autocast, run))
        return Full(sum(parts.values()), found[-1])

    return on_copies(trace, model, inputs)


def within(
    model: nn.Module,
    recipe: Recipe,
    inputs: Any,
    full: Full,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> Within:
    """`sparsify_within` with a full step that was traced before; raises the same errors."""
    refuse_sparsified(model)
    run: dict[str, Any] = {"autocast": autocast, "forward": forward}
    known = full.outputs
    if not recipe.activation_checkpointing:
        checkpointing.advise(model)
    if not recipe.has_byte_budget:
        if known is None and METHODS[recipe.method].skips_outputs:
            with suppress(UsageError):  # a model that cannot be traced shows them in its first pass
                known = on_copies(partial(outputs.traced, **run), model, inputs)
        names = swap(model, recipe, known=known)
        log_stock(model, recipe)
        return Within(names, None)
    search = partial(_tried, recipe, full, run)
    again, known, parts = on_copies(search, model, inputs)
    assert again.recipe is not None
    rules = replace(again.recipe, activation_checkpointing=recipe.activation_checkpointing)
    names = (*again.names, *swap(model, rules, some=False, known=known))
    again.attach(model)
    if recipe.activation_checkpointing:
        parts = traced_bytes_by_module(model, inputs, **run)
        _check_checkpointed(model, recipe, sum(parts.values()), full.bytes)
    setattr(model, RECIPE, recipe)
    if again.names:
        what = "their inputs" if again.bits is None else f"{again.bits} bits"
        log.info("recomputed in the backward pass, from %s: %s", what, again.stars())
    log_stock(model, recipe)
    return Within(names, parts)


def _tried(
    recipe: Recipe,
    full: Full,
    run: Mapping[str, Any],
    twin: nn.Module,
    inputs: Any,
    left_out: bool = False,
) -> tuple[Reruns, Outputs, dict[str, int] | None]:
    """The way to meet a byte budget on a copy of a model, its output layers and stored bytes.

    left_out: whether checkpointing has been switched off. Raises UsageError with the largest
    possible ratio if this one cannot be met.
    """
    search = BudgetSearch(twin, inputs, recipe, run, full.outputs)
    search.budget = (1 - recipe.ratio) * full.bytes

    def without(twin: nn.Module, inputs: Any) -> Any:
        checkpointing.leave_out(twin)
        return _tried(recipe, full._replace(outputs=None), run, twin, inputs, True)

    checkpoints = not left_out and any(map(checkpointing.on, twin.modules()))
    if checkpoints:
        with suppress(UsageError):  # first the rules that meet the budget without it
            again, known, _ = on_copies(without, twin, inputs)
            if search.meets(again):
                return again, known, search.parts_of(again)
    again = search.way()
    if again.names and recipe.activation_checkpointing:
        raise UsageError(
            f"ratio {recipe.ratio:g} is met by {stock_type(twin).__name__} only if blocks are "
            f"recomputed from packed inputs ({again.stars()}); activation checkpointing stores "
            "them unpacked; leave activation checkpointing out."
        )
    if again.recipe is None:
        least = search.parts()
        own = "the model checkpoints activations, which razor does not need" * checkpoints
        reasons = [uncompressed(twin, least, full.bytes, search.budget), again.refusal, own]
        possible = math.floor(1000 * (1 - sum(least.values()) / full.bytes)) / 1000
        raise UsageError(
            f"ratio {recipe.ratio:g} cannot be met by {stock_type(twin).__name__} with this batch"
            f"{''.join(f': {reason}' for reason in reasons if reason)}; "
            f"the largest possible is {max(0.0, possible):g}."
        )
    if not search.is_close(again):
        log.warning(
            "%s meets ratio %g only with copies of so few bits that its gradient is not close to "
            "the exact one; choose a smaller ratio.",
            stock_type(twin).__name__,
            recipe.ratio,
        )
    return again, search.known, search.parts_of(again)


def _check_checkpointed(model: nn.Module, recipe: Recipe, now: int, full: int) -> None:
    """Restores a checkpointing model that stores too much, and raises UsageError."""
    if now > (1 - recipe.ratio) * full:
        restore(model)
        # Well below, since rules of more bits add to the stored rest.
        possible = math.floor(20 * (1 - now / full)) / 20
        share = units.percent(now / full)
        raise UsageError(
            f"activation checkpointing stores {share} of the bytes of full fine-tuning for this "
            f"batch, more than ratio {recipe.ratio:g} allows; leave it out, or choose "
            f"a ratio such as {max(0.0, possible):g}."
        )


def saved_bytes(
    model: nn.Module,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> int:
    """Bytes that autograd would hold between the forward and backward pass of a training step.

    Counts unique storages, without parameters and buffers, which exist anyway. The pass runs on
    fake copies in train mode: it allocates and computes nothing, and does not change the model,
    samplers or random state. A model that reads values runs on a real copy instead. Under a joint
    budget the largest blocks count as drawn. Warns if a model exceeds its byte budget, and by how
    much. Raises UsageError that names the module if the computation depends on values that neither
    the model nor the inputs have.

    Args:
        model: real, fake or on the meta device.
        inputs: a tensor, a tuple of arguments or a mapping of keywords; real, fake or on the meta
            device.
        autocast: the dtype of a mixed-precision step, None for none.
        forward: runs a model on inputs, and may compute a loss, whose saved bytes then count too;
            None calls the model.
    """
    recipe, run = recipe_of(model), dict[str, Any](autocast=autocast, forward=forward)
    if recipe is None or not recipe.has_byte_budget:
        if recipe is None:
            checkpointing.advise(model)
        return traced_bytes(model, inputs, **run)
    drawing.unhook(model, tell_excess)  # so that the first pass does not warn again
    parts = traced_bytes_by_module(model, inputs, **run)
    note_excess(model, recipe, parts, stock_parts(model, inputs, **run))
    return sum(parts.values())
