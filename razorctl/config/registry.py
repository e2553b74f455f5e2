"""Names: those that a user may say, the files that define them, and how many read as one."""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from types import ModuleType
from typing import TypeVar

from razorctl.errors import UsageError

Entry = TypeVar("Entry")
NEAR = 0.6  # at least this share of the letters of two names, in order


def modules(package: str, path: Iterable[str], skip: Iterable[str] = ()) -> list[ModuleType]:
    """Every module of a package but for `skip`, imported: a new file needs no other mention."""
    return [
        importlib.import_module(f"{package}.{file.name}")
        for file in pkgutil.iter_modules(path)
        if file.name not in skip
    ]


def find(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of that name; raises UsageError with the nearest one if there is none."""
    if name not in entries:
        raise unknown(what, name, entries)
    return entries[name]


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not known; says the nearest one that is, or all if none is near.

    Near is one of which a few letters differ, or that begins or ends with the name.
    """
    names = sorted(known)

    def likeness(other: str) -> float:
        ours, theirs = name.casefold(), other.casefold()
        part = len(ours) > 1 and (theirs.startswith(ours) or theirs.endswith(ours))
        return part + SequenceMatcher(None, ours, theirs).ratio()

    nearest = max(names, key=likeness, default=None)
    near = nearest is not None and likeness(nearest) >= NEAR
    mend = f"did you mean {nearest!r}?" if near else f"known: {', '.join(names)}."
    return UsageError(f"unknown {what} {name!r}; {mend}")


def starred(name: str) -> str:
    """A dotted name with `*` for the numbers of blocks: one for a module and its kin in others."""
    *outer, own = (re.sub(r"^\d+$", "*", part) for part in name.split("."))
    return ".".join([*(re.sub(r"_\d+$", "_*", part) for part in outer), own])
