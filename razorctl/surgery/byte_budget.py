"""The byte budget of `razor`: met for a model and its inputs, or compared with what it keeps."""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from razorctl import units
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer, stock_type
from razorctl.memory.saved import Forward, on_copies, traced_bytes, traced_bytes_by_module
from razorctl.recipe import Recipe
from razorctl.surgery import freezing, reruns
from razorctl.surgery.budget_search import BudgetSearch, Reruns
from razorctl.surgery.sparsify import (
    RECIPE,
    recipe_of,
    refuse_sparsified,
    restore,
    sparsify,
    swap,
)
from razorctl.surgery.stock_modules import log_stock

log = logging.getLogger(__name__)

LEAST = 0.01  # share of the bytes of full from which on a warning names a part
FELL_BACK = 0.9  # of what a stock module keeps, from which on a razor layer ran as one
CLASSIFIER = "the classifier"


def sparsify_within(
    model: nn.Module,
    recipe: Recipe,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
    full: int | None = None,
) -> tuple[str, ...]:
    """Sparsifies a model so that a step on `inputs` keeps at most 1 - ratio of what full keeps.

    `sparsify` alone chooses rules that meet the byte budget on the models that they were measured
    on. This function traces the model at hand and takes rules of fewer bits where it keeps more,
    down to those that are close; convolutions are so only with more bits than other layers, and get
    all that the budget leaves where the recipe's own are not. If none of these meet the budget,
    blocks run again in the backward pass, from their inputs where that suffices or the model reads
    values, else from copies of them in 16 bits or fewer (`reruns`); those that spare most are
    first, and only those that are needed. A block may be most of the model if what it holds, as it
    runs again, is within twice the budget. A method without a byte budget is left to `sparsify`.
    Activation checkpointing changes no rule: the budget is met without it, and must be met with it
    too.

    Returns the names of the modules that run again, then those of the swapped ones. Raises what
    `sparsify` raises, and UsageError with the largest ratio that can be met if this one cannot; the
    model is then as it was.

    Args:
        model: a stock model.
        recipe: its ratio is the byte budget.
        inputs: of a step, as in `saved_bytes`.
        autocast: the dtype of a mixed-precision step, None for none.
        forward: as in `saved_bytes`.
        full: the bytes that a step on `inputs` keeps in full, if they are known.
    """
    if not recipe.has_byte_budget:
        return sparsify(model, recipe)
    refuse_sparsified(model)
    run: dict[str, Any] = {"autocast": autocast, "forward": forward}
    again, full = on_copies(partial(_tried, recipe, full, run), model, inputs)
    assert again.recipe is not None
    rules = replace(again.recipe, activation_checkpointing=recipe.activation_checkpointing)
    names = (*again.names, *swap(model, rules, some=False))
    again.attach(model)
    if recipe.activation_checkpointing:
        _check_checkpointed(model, recipe, traced_bytes(model, inputs, **run), full)
    setattr(model, RECIPE, recipe)
    if again.names:
        what = "their inputs" if again.bits is None else f"{again.bits} bits"
        log.info("run again in the backward pass, from %s: %s", what, again.stars())
    log_stock(model, recipe)
    return names


def _tried(
    recipe: Recipe, full: int | None, run: Mapping[str, Any], twin: nn.Module, inputs: Any
) -> tuple[Reruns, int]:
    """The way to meet a recipe's byte budget on a copy of a model, and the bytes that full keeps.

    Raises UsageError with the largest ratio that can be met if this one cannot.
    """
    search = BudgetSearch(twin, inputs, recipe, run)
    known = sum(search.parts().values()) if full is None else full
    search.budget = (1 - recipe.ratio) * known
    again = search.way()
    if again.names and recipe.activation_checkpointing:
        raise UsageError(
            f"ratio {recipe.ratio:g} is met by {stock_type(twin).__name__} only if blocks run "
            f"again from packed inputs ({again.stars()}), which its own activation checkpointing "
            "keeps whole; leave activation checkpointing out."
        )
    if again.recipe is None:
        least = search.parts()
        reasons = [uncompressed(twin, least, known, search.budget), again.refusal]
        possible = math.floor(1000 * (1 - sum(least.values()) / known)) / 1000
        raise UsageError(
            f"ratio {recipe.ratio:g} cannot be met by {stock_type(twin).__name__} with this batch"
            f"{''.join(f': {reason}' for reason in reasons if reason)}; "
            f"the largest that can is {max(0.0, possible):g}."
        )
    if not search.is_close(again):
        log.warning(
            "%s meets ratio %g by copies of so few bits that its gradient is not close to the "
            "exact one; a smaller ratio brings it closer.",
            stock_type(twin).__name__,
            recipe.ratio,
        )
    return again, known


def _check_checkpointed(model: nn.Module, recipe: Recipe, now: int, full: int) -> None:
    """Raises UsageError if a model that checkpoints keeps too much, after restoring it."""
    if now > (1 - recipe.ratio) * full:
        restore(model)
        # Well below, since rules of more bits add to the rest.
        possible = math.floor(20 * (1 - now / full)) / 20
        share = units.percent(now / full)
        raise UsageError(
            f"activation checkpointing keeps {share} of what full fine-tuning keeps of this batch, "
            f"more than ratio {recipe.ratio:g} allows; leave it out, or choose "
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

    Unique storages are counted, without parameters and buffers, which exist anyway. The pass runs
    on fake copies in train mode, so it allocates nothing, computes nothing and does not change the
    model, samplers or random state. A model that reads values runs on a real copy instead. Under a
    joint budget the largest blocks count as drawn. A warning says if a model exceeds its byte
    budget, and by how much. Raises UsageError, which names the module, if what the model does
    depends on values that it or the inputs do not have.

    Args:
        model: real, fake or on the meta device.
        inputs: a tensor, a tuple of arguments or a mapping of keywords; real, fake or on the meta
            device.
        autocast: the dtype of a mixed-precision step, None for none.
        forward: runs a model on inputs, and may compute a loss, whose kept bytes then count too;
            None calls the model.
    """
    recipe = recipe_of(model)
    if recipe is None or not recipe.has_byte_budget:
        return traced_bytes(model, inputs, autocast=autocast, forward=forward)
    parts = traced_bytes_by_module(model, inputs, autocast=autocast, forward=forward)

    def of_stock(twin: nn.Module, inputs: Any) -> dict[str, int]:
        restore(twin)
        return traced_bytes_by_module(twin, inputs, autocast=autocast, forward=forward)

    note_excess(model, recipe, parts, on_copies(of_stock, model, inputs))
    return sum(parts.values())


def note_excess(
    model: nn.Module, recipe: Recipe, parts: Mapping[str, int], stock: Mapping[str, int]
) -> None:
    """Warns if a sparsified model exceeds its byte budget; parts, stock: as in `uncompressed`."""
    total, full = sum(parts.values()), sum(stock.values())
    most = (1 - recipe.ratio) * full
    if total > most:
        unknown = uncompressed(model, parts, full, most, stock)
        log.warning(
            "%s keeps %s for backward of what full fine-tuning does, more than the %s that ratio "
            "%g allows%s; razorctl.sparsify_within keeps less, where that can mend it.",
            stock_type(model).__name__,
            units.percent(total / full),
            units.percent(1 - recipe.ratio),
            recipe.ratio,
            unknown and f": {unknown}",
        )


def uncompressed(
    model: nn.Module,
    parts: Mapping[str, int],
    full: int,
    most: float,
    stock: Mapping[str, int] | None = None,
) -> str:
    """A sentence about the modules that stay stock: what they are, and their shares of `full`.

    It is empty if they keep at most `most` bytes.

    Args:
        model: a sparsified model.
        parts: the bytes that its modules keep, as `traced_bytes_by_module` returns them.
        full: the bytes that the stock model keeps.
        most: the least that the sentence is about, in bytes.
        stock: the bytes that the modules of the stock model keep, if they are known. A razor layer
            that keeps as much ran the stock forward.
    """
    counts, sizes = Counter[str](), Counter[str]()
    for name, size in parts.items():
        module = model.get_submodule(name)
        fell_back = stock is not None and size >= FELL_BACK * stock.get(name, math.inf)
        razor = isinstance(module, RazorLayer) and not (module.partial or fell_back)
        if not razor and not reruns.attached(module):
            part = _part(model, module)
            counts[part] += 1
            sizes[part] += size
    if sizes.total() <= most:
        return ""
    largest_first = sizes.most_common()
    large = [(part, size) for part, size in largest_first if size >= LEAST * full]
    large = large or largest_first[:1]
    words: list[str] = []
    for part, size in large:
        what = part if part == CLASSIFIER else units.count(counts[part], part)
        of_full = "" if words else " of full's activations"
        words.append(f"{what} ({units.percent(size / full)}{of_full})")
    one = len(large) == 1 and counts[large[0][0]] == 1
    return f"{', '.join(words)} {'is' if one else 'are'} not compressed"


def _part(model: nn.Module, module: nn.Module) -> str:
    """A noun for a stock module."""
    with suppress(UsageError):  # a model without a last layer
        if freezing.head(model)[1] is module:
            return CLASSIFIER
    kind = stock_type(module).__name__
    return f"{kind} module" if any(module.children()) else f"{kind} layer"
