"""The razor classes of stock types, and the residual branches of blocks.

Each kind of torch's layers has a file with `SWAPS`, which maps exact stock types to their razor
classes. Each library has a file of its name with its own `SWAPS`. A file may also have `BRANCHES`,
which maps exact block types to their residual branches. A branch is the names of its modules that
keep something; the last of them gives the branch's output. `PRE_NORM` maps the block types that are
nothing but residual connections with a norm first to all modules of each connection, and
`LINEAR_FIRST` has the types after such a norm that only multiply its output by weights. A library's
`recognized` gives the razor class of a type that is not listed, by its code. `recognition` finds it
by the values of a module. A type with another forward than a file expects is unknown
(`known_forwards`).
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
from razorctl.layers.known_forwards import alike, fingerprint, known, name_of
from razorctl.layers.own_forward import place
from razorctl.registry import modules

OF_LIBRARIES = f"{layers.__name__}.libraries"
Branches = tuple[tuple[str, ...], ...]
LIBRARIES = (
    "timm",
    "torchvision",
    "transformers",
    "peft",
)  # a file is imported once its library is loaded


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
    """The files of torch's layers, and those of the libraries that are loaded."""
    return [*_of_torch(), *(importlib.import_module(f"{OF_LIBRARIES}.{name}") for name in loaded)]


def swaps() -> Mapping[type[nn.Module], type[RazorLayer]]:
    """Stock types -> razor classes: torch's, and those of every library that is loaded.

    A library that is not loaded has no module in any model, and may be slow to load. `razor_of`
    knows more types.
    """
    return _registered("SWAPS")


def razor_of(stock: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of exactly that stock type; None if there is none."""
    listed = swaps().get(stock)
    if listed is not None and (known(stock) or not listed.rewrites):
        return listed
    package = stock.__module__.partition(".")[0]
    if package not in LIBRARIES:
        return None
    file = importlib.import_module(f"{OF_LIBRARIES}.{package}")
    razor: type[RazorLayer] | None = file.recognized(stock) if "recognized" in vars(file) else None
    return razor


def razor_of_module(module: nn.Module) -> type[RazorLayer] | None:
    """The razor class of a module by its stock type; None if it has a forward of its own."""
    return razor_of(stock_type(module)) if place(module) else None


def linear_types() -> frozenset[type[nn.Module]]:
    """The stock types of linear layers."""
    return frozenset(stock for stock, razor in swaps().items() if razor.kind == "linear")


def branches() -> Mapping[type[nn.Module], Branches]:
    """Stock block types -> their residual branches, of every library that is loaded."""
    return _registered("BRANCHES")


def branches_of(block: type[nn.Module]) -> Branches:
    """The residual branches of a block type, none if they are unknown."""
    listed = branches()
    if block in listed or not block.__module__.startswith("transformers."):
        return listed.get(block, ())
    own = fingerprint(block)
    alike = (names for other, names in listed.items() if own and fingerprint(other) == own)
    return next(alike, ())


def connections_of(block: type[nn.Module]) -> Branches:
    """The residual connections of a block type that is nothing else; none if they are unknown."""
    listed = _registered("PRE_NORM")
    if block in listed or not block.__module__.startswith("transformers."):
        return listed[block] if block in listed and known(block) else ()
    same = alike(block)
    return next((names for other, names in listed.items() if name_of(other) in same), ())


def linear_first() -> frozenset[type[nn.Module]]:
    """The types after a norm of `connections_of` that only multiply its output by weights."""
    listed = frozenset().union(*(getattr(file, "LINEAR_FIRST", ()) for file in _files(_loaded())))
    return frozenset(filter(known, listed))


def _registered(name: str) -> Mapping[type[nn.Module], Any]:
    return _entries(name, _loaded())


@cache
def _entries(name: str, loaded: tuple[str, ...]) -> Mapping[type[nn.Module], Any]:
    entries: dict[type[nn.Module], Any] = {}
    for file in _files(loaded):
        entries |= getattr(file, name, {})
    return entries
