"""Names: those that a user may say, the files that define them, and how many read as one."""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import TypeVar

from razorctl.errors import UsageError

Entry = TypeVar("Entry")


def modules(package: str, path: Iterable[str]) -> list[ModuleType]:
    """Every module of a package, imported, so that a new file needs no other mention."""
    return [
        importlib.import_module(f"{package}.{file.name}") for file in pkgutil.iter_modules(path)
    ]


def find(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of that name; raises UsageError with the nearest one if there is none."""
    if name not in entries:
        raise unknown(what, name, entries)
    return entries[name]


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not known; says the nearest one that is."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    mend = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
    return UsageError(f"unknown {what} {name!r}; {mend}")


def starred(name: str) -> str:
    """A dotted name with `*` for the numbers of blocks: one for a module and its kin in others."""
    *outer, own = (re.sub(r"^\d+$", "*", part) for part in name.split("."))
    return ".".join([*(re.sub(r"_\d+$", "_*", part) for part in outer), own])
