"""How `razor` spends its bytes: the rule of every layer kind that does least harm at a ratio.

`allocations.json`, which scripts/bench/allocate.py writes, lists what is worth choosing, apart for
activations of 16 bits ("narrow") and wider ones ("wide"): rules, the ratio that they meet on every
model measured there, and the error of the gradient that they were measured to make.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from razorctl.errors import UsageError

# The share of the byte budget that is left free, for models unlike those measured. In single
# precision it costs a hundredth of error, in 16 bits it would cost a tenth.
RESERVE = {"wide": 0.12, "narrow": 0.0}


@cache
def _choices() -> Mapping[str, list[dict[str, Any]]]:
    text = files("razorctl.rules").joinpath("allocations.json").read_text()
    choices: dict[str, list[dict[str, Any]]] = json.loads(text)["choices"]
    return choices


def largest(width: str) -> float:
    """The largest ratio that can be met, to three decimals, of a width in RESERVE."""
    saved: float = min(1 - choice["ratio"] for choice in _choices()[width])
    return math.floor(1000 * (1 - saved / (1 - RESERVE[width]))) / 1000


def allocate(ratio: float) -> dict[str, str]:
    """Layer kind -> "WIDE/NARROW", the names of its rules in `rules.registry.RULES`.

    NARROW is "unmet" where the ratio can be met in wide activations alone. Raises UsageError if
    it cannot be met at all.
    """
    if ratio > largest("wide"):
        raise UsageError(
            f"ratio {ratio:g} cannot be met; the largest that can is {largest('wide'):g}."
        )
    wide, narrow = (_best(width, ratio) for width in RESERVE)
    assert wide is not None
    return {
        kind: f"{rule}/{'unmet' if narrow is None else narrow[kind]}" for kind, rule in wide.items()
    }


def _best(width: str, ratio: float) -> dict[str, str] | None:
    """The rules of least error among those that meet the ratio."""
    budget = (1 - ratio) * (1 - RESERVE[width]) + 1e-9
    meeting = [choice for choice in _choices()[width] if 1 - choice["ratio"] <= budget]
    rules: dict[str, str] | None = None
    if meeting:
        rules = min(meeting, key=lambda choice: choice["error"])["rules"]
    return rules
