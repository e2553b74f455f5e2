"""The razor classes of stock types, and the residual branches of blocks.

A file for a kind of torch layers or for a library may define:
- `SWAPS`: exact stock type -> razor class.
- `BRANCHES`: exact block type -> residual branches. A branch is the names of its modules that store
  something; the last one computes the branch's output.
- `PRE_NORM`: block type -> all modules of each connection, for blocks that consist of residual
  connections with a norm first. `LINEAR_FIRST`: types that only multiply that norm by weights.
- `recognized` (libraries only): the razor class of an unlisted type, by its code.

`recognition` tells razor classes by the values that a module computes. A type whose forward has
changed counts as unknown (`known_forwards`).
"""

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from itertools import chain
from types import ModuleType
from typing import Any

from torch import nn

from razorctl import layers
from razorctl.layers.base import RazorLayer, stock_type
from razorctl.layers.known_forwards import alike, fingerprint, is_known, name_of
from razorctl.layers.own_forward import place
from razorctl.registry import modules

OF_LIBRARIES = f"{layers.__name__}.libraries"
Branches = tuple[tuple[str, ...], ...]
# A file is imported once its library is loaded.
LIBRARIES = ("timm", "torchvision", "transformers", "peft")


@cache
def _of_torch() -> tuple[ModuleType, ...]:
    # `compiled_memo` loads the compiler, files of these names their libraries.
    skip = ("by_type", "compiled_memo", *LIBRARIES)
    files = modules(layers.__name__, layers.__path__, skip=skip)
    folders = [file for file in files if hasattr(file, "__path__")]
    inside = (modules(folder.__name__, folder.__path__, skip=skip) for folder in folders)
    return (*files, *chain.from_iterable(inside))


def _loaded() -> tuple[str, ...]:
    """The libraries that are loaded."""
    return tuple(library for library in LIBRARIES if library in sys.modules)


@cache
def _files(loaded: tuple[str, ...]) -> list[ModuleType]:
    """The files of torch's layers and of the given libraries."""
    return [*_of_torch(), *(importlib.import_module(f"{OF_LIBRARIES}.{name}") for name in loaded)]


def swaps() -> Mapping[type[nn.Module], type[RazorLayer]]:
    """Stock types -> razor classes, of torch and of every library that is loaded.

    A library that is not loaded has no module in any model, and may be slow to import. `razor_of`
    knows more types.
    """
    return _registered("SWAPS")


def razor_of(stock: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of exactly this stock type, else None."""
    listed = swaps().get(stock)
    if listed is not None and (is_known(stock) or not listed.rewrites):
        return listed
    package = stock.__module__.partition(".")[0]
    if package not in LIBRARIES:
        return None
    file = importlib.import_module(f"{OF_LIBRARIES}.{package}")
    razor: type[RazorLayer] | None = file.recognized(stock) if "recognized" in vars(file) else None
    return razor


def razor_of_module(module: nn.Module) -> type[RazorLayer] | None:
    """The razor class of a module by its stock type; None if foreign code overrides its forward."""
    return razor_of(stock_type(module)) if place(module) else None


def linear_types() -> frozenset[type[nn.Module]]:
    """The stock types of linear layers."""
    return frozenset(stock for stock, razor in swaps().items() if razor.kind == "linear")


def branches() -> Mapping[type[nn.Module], Branches]:
    """Stock block types -> residual branches, of every library that is loaded."""
    return _registered("BRANCHES")


def branches_of(block: type[nn.Module]) -> Branches:
    """The residual branches of a block type; empty if they are unknown."""
    listed = branches()
    if block in listed or not block.__module__.startswith("transformers."):
        return listed.get(block, ())
    own = fingerprint(block)
    alike = (names for other, names in listed.items() if own and fingerprint(other) == own)
    return next(alike, ())


def connections_of(block: type[nn.Module]) -> Branches:
    """The modules of each residual connection of a `PRE_NORM` block type; empty if unknown."""
    listed = _registered("PRE_NORM")
    if block in listed or not block.__module__.startswith("transformers."):
        return listed[block] if block in listed and is_known(block) else ()
    same = alike(block)
    return next((names for other, names in listed.items() if name_of(other) in same), ())


def linear_first() -> frozenset[type[nn.Module]]:
    """The `LINEAR_FIRST` types whose forward is known."""
    listed = frozenset().union(*(getattr(file, "LINEAR_FIRST", ()) for file in _files(_loaded())))
    return frozenset(filter(is_known, listed))


def _registered(name: str) -> Mapping[type[nn.Module], Any]:
    return _entries(name, _loaded())


@cache
def _entries(name: str, loaded: tuple[str, ...]) -> Mapping[type[nn.Module], Any]:
    entries: dict[type[nn.Module], Any] = {}
    for file in _files(loaded):
        entries |= getattr(file, name, {})
    return entries
