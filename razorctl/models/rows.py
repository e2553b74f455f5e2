"""Types of what models are fed with."""

from collections.abc import Callable
from typing import Any

Rows = dict[str, list[Any]]
Progress = Callable[[str], None]  # is called with what is being done
