"""Names that a user can type: their defining modules, their look-up, and their errors."""

import heapq
import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from types import ModuleType
from typing import TypeVar

from razorctl.errors import UsageError

Entry = TypeVar("Entry")
NEAR = 0.7  # the least similarity, by SequenceMatcher, of a name that an error suggests
MOST, NEAREST = 40, 10  # an error lists up to MOST names, else only NEAREST


def modules(package: str, path: Iterable[str], skip: Iterable[str] = ()) -> list[ModuleType]:
    """Imports and returns all modules of a package except `skip`, so new files need no entry."""
    return [
        importlib.import_module(f"{package}.{file.name}")
        for file in pkgutil.iter_modules(path)
        if file.name not in skip
    ]


def find(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of a name; raises UsageError with the nearest name if there is none."""
    if name not in entries:
        raise unknown(what, name, entries)
    return entries[name]


def unknown(what: str, name: str, known: Iterable[str], more: str = "") -> UsageError:
    """The error for an unknown name; it suggests the nearest known name, or lists known names.

    A known name is near if it begins or ends with `name`, if `name` begins with it, or if only a
    few letters differ; case, hyphens and the like do not count. Of more than MOST names, only the
    most similar ones are listed.

    Args:
        more: what else is wrong with the name, such as ", and so on".
    """
    names = sorted(known)

    def likeness(other: str) -> float:
        ours, theirs = plain(name), plain(other)
        part = len(ours) > 1 and (theirs.startswith(ours) or theirs.endswith(ours))
        part = part or (len(theirs) > 3 and ours.startswith(theirs))
        return part + SequenceMatcher(None, ours, theirs).ratio()

    nearest = max(names, key=likeness, default=None)
    if nearest is not None and likeness(nearest) >= NEAR:
        mend = f"did you mean {nearest!r}?"
    elif len(names) <= MOST:
        mend = f"known: {', '.join(names)}."
    else:
        some = sorted(heapq.nlargest(NEAREST, names, key=likeness))
        mend = f"known: {', '.join(some)} and {len(names) - NEAREST:,} more."
    return UsageError(f"unknown {what} {name!r}{more}; {mend}")


def plain(name: str) -> str:
    """A name in lower case without separators."""
    return re.sub(r"[\s_.-]", "", name.casefold())


def starred(name: str) -> str:
    """A dotted module name with `*` for block numbers, so that equal parts of blocks share it."""
    *outer, own = (re.sub(r"^\d+$", "*", part) for part in name.split("."))
    return ".".join([*(re.sub(r"_\d+$", "_*", part) for part in outer), own])
