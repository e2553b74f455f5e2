"""Bad rows: how they are named, counted and refused."""

from collections.abc import Sequence

from razorctl import units
from razorctl.errors import DataError

NAMED = 5  # bad rows that a sentence names


def line(place: str, reason: str) -> str:
    """A bad file or row in words."""
    return f"{place} ({reason})"


def refusal(name: str, lines: Sequence[str], mend: str) -> DataError:
    """The error for bad files and rows, with all of them; `mend` ends the sentence."""
    more = len(lines) - NAMED
    named = ", ".join(lines[:NAMED]) + (f" and {more:,} more" if more > 0 else "")
    rows = units.count(len(lines), "bad row")
    return DataError(f"{name} has {rows}: {named}; {mend}.", lines if more > 0 else ())
