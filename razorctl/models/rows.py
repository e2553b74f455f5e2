"""Types of the rows that models take."""

from collections.abc import Callable
from typing import Any

Rows = dict[str, list[Any]]
Progress = Callable[[str], None]  # called with a text on what is being done
