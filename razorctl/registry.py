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
NEAR = 0.7  # least likeness of a name that an error suggests, by SequenceMatcher
MOST, NEAREST = 40, 10  # names that an error lists, and how many it names if there are more


def modules(package: str, path: Iterable[str], skip: Iterable[str] = ()) -> list[ModuleType]:
    """Imports and returns all modules of a package except `skip`, so new files need no entry."""
    return [
        importlib.import_module(f"{package}.{file.name}")
        for file in pkgutil.iter_modules(path)
        if file.name not in skip
    ]


def find(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of a name; raises UsageError, with the nearest name, if there is none."""
    if name not in entries:
        raise unknown(what, name, entries)
    return entries[name]


def unknown(what: str, name: str, known: Iterable[str], more: str = "") -> UsageError:
    """The error for an unknown name, which suggests the nearest known one, or lists them.

    A known name is near if it begins or ends with `name`, if `name` begins with it, or if only a
    few letters differ; case, hyphens and the like do not count. Of more than MOST names those are
    listed that are most like it.

    Args:
        more: what else is wrong with the name, as in ", and so on".
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
    """A name in lower case, without what separates its parts."""
    return re.sub(r"[\s_.-]", "", name.casefold())


def starred(name: str) -> str:
    """A dotted module name with `*` for block numbers, so that equal parts of blocks share it."""
    *outer, own = (re.sub(r"^\d+$", "*", part) for part in name.split("."))
    return ".".join([*(re.sub(r"_\d+$", "_*", part) for part in outer), own])
