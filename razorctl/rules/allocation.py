"""The rules of `razor`: for a ratio, those of the least gradient error that meet it.

`allocations.json`, which scripts/bench/allocate.py writes, lists the combinations of rules that are
worth choosing, with one rule for each layer kind. Activations of 16 bits ("narrow") and wider ones
("wide") have lists of their own. Each combination has the ratio that it meets on every model
measured there, and its measured gradient error.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from razorctl.errors import UsageError

# The share of the byte budget that is left free, for models unlike those measured. In single
# precision it costs a hundredth of error at ratio 0.9, in 16 bits it would cost more.
RESERVE = {"wide": 0.1, "narrow": 0.0}


class Names(NamedTuple):
    """The names in `rules.registry.RULES` of the rules for wide activations and for narrow ones.

    narrow is None if no rule meets the ratio with activations of 16 bits.
    """

    wide: str
    narrow: str | None


def width(precision: str) -> str:
    """The width of the activations of a precision of `Job`, a key of RESERVE."""
    return "wide" if precision == "fp32" else "narrow"


@cache
def _choices() -> Mapping[str, list[dict[str, Any]]]:
    import json  # imported here: --help needs none

    text = Path(__file__).with_name("allocations.json").read_text("utf-8")
    choices: dict[str, list[dict[str, Any]]] = json.loads(text)["choices"]
    return choices


def largest(width: str) -> float:
    """The largest ratio that `width`, a key of RESERVE, can meet, down to three decimals."""
    saved: float = min(1 - choice["ratio"] for choice in _choices()[width])
    return math.floor(1000 * (1 - saved / (1 - RESERVE[width]))) / 1000


def allocate(ratio: float) -> dict[str, Names]:
    """The names of the rules of each layer kind; raises UsageError if none meet the ratio."""
    if ratio > largest("wide"):
        raise UsageError(
            f"ratio {ratio:g} cannot be met; the largest that can is {largest('wide'):g}."
        )
    wide, narrow = (_best(width, ratio) for width in RESERVE)
    assert wide is not None
    return {kind: Names(rule, narrow[kind] if narrow else None) for kind, rule in wide.items()}


def _best(width: str, ratio: float) -> dict[str, str] | None:
    """The rules of least error among those that meet the ratio, None if none do."""
    budget = (1 - ratio) * (1 - RESERVE[width]) + 1e-9
    meeting = [choice for choice in _choices()[width] if 1 - choice["ratio"] <= budget]
    rules: dict[str, str] | None = None
    if meeting:
        rules = min(meeting, key=lambda choice: choice["error"])["rules"]
    return rules
