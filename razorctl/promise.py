"""The ratio of `razor` as a promise: held to what a model saves with the inputs at hand."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from razorctl.allocation import largest
from razorctl.errors import UsageError
from razorctl.memory import saved_bytes
from razorctl.recipe import METHODS, Recipe
from razorctl.surgery import restore, sparsify

TIGHTER = 0.97  # of the bytes, from one try to the next


def sparsify_within(
    model: nn.Module, recipe: Recipe, inputs: Any, *, autocast: torch.dtype | None = None
) -> tuple[str, ...]:
    """`sparsify`, so that a step on `inputs` saves at most 1 - ratio of what it does in full.

    `sparsify` alone chooses rules that keep the promise on the models that they were measured on;
    this traces the model at hand, and where it saves more, spares more. Other methods than those
    whose ratio is such a promise are left as they are. Raises UsageError with the largest ratio
    that can be kept, and leaves the model as it was, if this one cannot.
    """
    if METHODS[recipe.method].ratio != "bytes" or not recipe.prunes:
        return sparsify(model, recipe)
    full = saved_bytes(model, inputs, autocast=autocast)
    most = largest("wide" if autocast is None else "narrow")
    ratio = recipe.ratio
    while True:
        names = sparsify(model, replace(recipe, ratio=ratio))
        try:
            saved = saved_bytes(model, inputs, autocast=autocast)
        except UsageError:  # the ratio is beyond what any rule keeps in 16 bits
            restore(model)
            raise
        if saved <= (1 - recipe.ratio) * full:
            return names
        restore(model)
        if ratio >= most:
            break
        ratio = min(most, 1 - TIGHTER * (1 - ratio))
    possible = math.floor(1000 * (1 - saved / full)) / 1000
    raise UsageError(
        f"ratio {recipe.ratio:g} cannot be met by {type(model).__name__} with this batch; "
        f"the largest that can is {max(0.0, possible):g}."
    )
