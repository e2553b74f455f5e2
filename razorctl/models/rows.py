"""Types of the rows that models take."""

from collections.abc import Callable, Iterable
from typing import Any

Rows = dict[str, list[Any]]
Progress = Callable[[str], None]  # called with a text on what is being done

TEXT_COLUMNS, NEGATIVE = (
    ("text", "text_pair"),
    "negative.",
)  # columns of texts; of negatives, a prefix


def text_columns(names: Iterable[str]) -> list[str]:
    """Those of the columns of rows that are texts; the negatives of an embedding come last."""
    names = [*names]
    negatives = (name for name in names if name.startswith(NEGATIVE))
    return [*(name for name in TEXT_COLUMNS if name in names), *negatives]
