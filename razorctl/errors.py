"""Errors a user can mend: one sentence each, with the exit code the command line ends with."""

from collections.abc import Iterable
from difflib import get_close_matches


class RazorError(Exception):
    """Anything razorctl refuses or cannot do."""

    exit_code = 1


class UsageError(RazorError, ValueError):
    """An argument, flag or setting that cannot be honoured."""

    exit_code = 2


class DataError(RazorError):
    """A data set whose contents are not usable."""

    exit_code = 5


class MissingError(RazorError):
    """Something that should be on disk or reachable is not."""

    exit_code = 6


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not in a registry; says the nearest known one."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    mend = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
    return UsageError(f"unknown {what} {name!r}; {mend}")
