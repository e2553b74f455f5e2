"""Messages about an exceeded byte budget: by how much, and which modules store it."""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from torch import nn

from razorctl import units
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer, stock_type
from razorctl.layers.heads.outputs import MARK
from razorctl.surgery import freezing, reruns

log = logging.getLogger(__name__)

LEAST = 0.01  # of the bytes of full fine-tuning: warnings name parts that store at least this share
FELL_BACK = 0.9  # of a stock module's bytes: a razor layer that stores as much ran as stock
OUTPUT = "output layer"


def note_excess(
    model: nn.Module, recipe: Recipe, parts: Mapping[str, int], stock: Mapping[str, int]
) -> None:
    """Warns if a sparsified model exceeds its byte budget; parts, stock: as in `uncompressed`."""
    total, full = sum(parts.values()), sum(stock.values())
    most = (1 - recipe.ratio) * full
    if total > most:
        unknown = uncompressed(model, parts, full, most, stock)
        log.warning(
            "%s stores %s of the bytes of full fine-tuning for backward, more than the %s that "
            "ratio %g allows%s; razorctl.sparsify_within may store less.",
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

    Empty if they store at most `most` bytes.

    Args:
        model: a sparsified model.
        parts: module name -> the bytes that it stores, as of `traced_bytes_by_module`.
        full: the bytes that the stock model stores.
        most: in bytes.
        stock: as `parts`, for the stock model, if known. A razor layer that stores as much ran the
            stock forward.
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
        one = part == OUTPUT and counts[part] == 1
        what = "the classifier" if one else units.count(counts[part], part)
        of_full = "" if words else " of full fine-tuning"
        words.append(f"{what} ({units.percent(size / full)}{of_full})")
    one = len(large) == 1 and counts[large[0][0]] == 1
    return f"{', '.join(words)} {'is' if one else 'are'} not compressed"


def _part(model: nn.Module, module: nn.Module) -> str:
    """A noun for a stock module."""
    exact = vars(model).get(MARK)
    with suppress(UsageError):  # the model has no last layer
        names = exact.found.names if exact and exact.found else {freezing.head(model)[0]}
        if module in map(model.get_submodule, names):
            return OUTPUT
    kind = stock_type(module).__name__
    return f"{kind} module" if module._modules else f"{kind} layer"
