"""The bytes that each module of a model stores for backward, traced without running the model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer
from razorctl.layers.recognition.razor_class import razor_for
from razorctl.layers.recompute.replayed_state import unknown
from razorctl.memory.saved import Forward, on_copies, traced_bytes_by_module
from razorctl.surgery.excess import note_excess
from razorctl.surgery.sparsify import recipe_of, restore, sparsify, stock_parts

OTHER = "other"  # the kind of a module that no method swaps


@dataclass(frozen=True)
class Row:
    """The traced bytes that a module stores for backward, with the recipe and with `full`.

    module: its dotted name; "" for the model itself. type: its class. kind: its layer kind, as in
    `Method.rules`.
    """

    module: str
    type: str
    kind: str
    saved_bytes: int
    full_saved_bytes: int


@dataclass(frozen=True)
class KeptBytes:
    """The bytes that a model stores for backward, by module; model: its class."""

    model: str
    recipe: Recipe
    rows: tuple[Row, ...]

    def result(self) -> dict[str, Any]:
        """The rows and their sums, under the keys of `Profile.result`."""
        return {**sums(self.rows), **asdict(self)}


def sums(rows: Sequence[Row]) -> dict[str, Any]:
    """The bytes of all rows and of each layer kind; keys with "full" are of the method `full`."""
    kept, full = Counter[str](), Counter[str]()
    for row in rows:
        kept[row.kind] += row.saved_bytes
        full[row.kind] += row.full_saved_bytes
    return {
        "totals": {"saved_bytes": kept.total(), "full_saved_bytes": full.total()},
        "by_kind": dict(kept),
        "by_kind_full": dict(full),
    }


def kinds(net: nn.Module) -> dict[str, tuple[str, str]]:
    """Module name -> its class and its layer kind."""
    modules = {}
    for name, module in net.named_modules():
        razor = module if isinstance(module, RazorLayer) else razor_for(module)
        modules[name] = type(module).__name__, getattr(razor, "kind", OTHER)
    return modules


def make_rows(
    modules: Mapping[str, tuple[str, str]], kept: Mapping[str, int], full: Mapping[str, int]
) -> tuple[Row, ...]:
    """A row for each module that stores anything; modules: the result of `kinds`."""
    return tuple(
        Row(name, type_, kind, kept.get(name, 0), full.get(name, 0))
        for name, (type_, kind) in modules.items()
        if name in kept or name in full
    )


def trace_kept_bytes(
    model: nn.Module,
    inputs: Any,
    recipe: Recipe | None = None,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> KeptBytes:
    """Traces the bytes that a model stores for backward, stock and sparsified, by module.

    The model does not change. Raises what `sparsify` and `saved_bytes` raise, and UsageError for
    inputs without a tensor. If a byte budget is exceeded, a warning names the modules that do so.

    Args:
        model: a stock or a sparsified model.
        inputs: a tensor, or a tuple or a mapping with tensors.
        recipe: None is the recipe of a sparsified model, else the default one.
        autocast: as for `saved_bytes`.
        forward: as for `saved_bytes`.
    """
    leaves = tree_leaves(inputs)
    if not (any(isinstance(leaf, Tensor) for leaf in leaves) or unknown(leaves)):
        raise UsageError(
            f"the inputs of {type(model).__name__} have no tensor; give one, a tuple of tensors, "
            "or a mapping of names to tensors."
        )
    present = recipe_of(model)
    if present is not None and recipe not in (None, present):
        raise UsageError(
            "the model is sparsified by another recipe; leave the recipe out, or call "
            "razorctl.restore(model) first."
        )
    run: dict[str, Any] = {"autocast": autocast, "forward": forward}
    chosen = present or recipe or Recipe()

    full = stock_parts(model, inputs, **run)

    def trace(twin: nn.Module, batch: Any) -> tuple[Any, ...]:
        if present is None:
            sparsify(twin, chosen)
        kept = traced_bytes_by_module(twin, batch, **run)
        if chosen.has_byte_budget:
            note_excess(twin, chosen, kept, full)
        modules = kinds(twin)
        restore(twin)
        return modules | kinds(twin), kept

    modules, kept = on_copies(trace, model, inputs)
    return KeptBytes(type(model).__name__, chosen, make_rows(modules, kept, full))
