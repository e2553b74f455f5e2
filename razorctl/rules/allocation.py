"""The rules of `razor`: for a ratio, those of the fewest operations made again that are close.

`allocations.json`, which scripts/bench/allocate.py writes, lists the combinations of rules for
rising ratios, with one rule for each layer kind. Layer kinds of models with attention and of
convolutional ones have lists of their own, and so have activations of 16 bits ("narrow") and wider
ones ("wide"). Each combination has the ratio that it meets on every model measured there, its
measured gradient error, and its level: the higher it is, the more activations are made again in the
backward pass.
"""

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from razorctl.errors import UsageError
from razorctl.methods import CLOSE, FAMILIES, Family

# The share of the byte budget that is left free, for models unlike those measured. In 16 bits it
# would cost accuracy.
RESERVE = {"wide": 0.1, "narrow": 0.0}
FILE = Path(__file__).with_name("allocations.json")


class Names(NamedTuple):
    """The names in `rules.registry.RULES` of the rules for wide activations and for narrow ones."""

    wide: str
    narrow: str


def width(precision: str) -> str:
    """The width of the activations of a precision of `Job`, a key of RESERVE."""
    return "wide" if precision == "fp32" else "narrow"


@cache
def _choices(family: Family, width: str) -> list[dict[str, Any]]:
    import json  # imported here: --help needs none

    document = json.loads(FILE.read_text("utf-8"))
    choices: list[dict[str, Any]] = document["choices"][family][width]
    return choices


@cache
def largest(family: Family = "attention") -> float:
    """The largest ratio that a family can meet at any width, down to three decimals."""
    kept: list[float] = [
        min(1 - choice["ratio"] for choice in _choices(family, width)) / (1 - reserve)
        for width, reserve in RESERVE.items()
    ]
    return math.floor(1000 * (1 - max(kept))) / 1000


def kinds_of(family: Family) -> set[str]:
    """The layer kinds whose rules are those of a family."""
    return set(_best(family, "wide", 0.0))


def closest(family: Family, width: str) -> float:
    """The largest ratio whose rules are predicted to be close, down to three decimals."""
    return close_ratios(family, width)[-1]


@cache
def close_ratios(family: Family, width: str) -> list[float]:
    """The ratios that rules predicted to be close can meet, ascending, down to three decimals."""
    most = 2 * (1 - CLOSE)  # a cosine c is a squared error of about 2 (1 - c)
    kept: list[float] = [
        (1 - choice["ratio"]) / (1 - RESERVE[width])
        for choice in _choices(family, width)
        if choice["error"] <= most
    ]
    return sorted(math.floor(1000 * (1 - share)) / 1000 for share in kept)


@lru_cache
def allocate(ratio: float, convolution: float | None = None) -> Mapping[str, Names]:
    """The names of the rules of each layer kind; raises UsageError if none meet the ratio.

    Where only convolutions cannot meet it, they have the fewest bits. convolution: a ratio of their
    own.
    """
    if ratio > largest():
        raise UsageError(f"ratio {ratio:g} cannot be met; the largest that can is {largest():g}.")
    names: dict[str, Names] = {}
    of_convolutions = ratio if convolution is None else convolution
    for family in FAMILIES:
        own = of_convolutions if family == "convolution" else ratio
        wide, narrow = _best(family, "wide", own), _best(family, "narrow", own)
        names |= {kind: Names(rule, narrow[kind]) for kind, rule in wide.items()}
    return names


@cache
def _best(family: Family, width: str, ratio: float) -> dict[str, str]:
    """The rules of the first choice that meets the ratio, or of the last."""
    least = 1 - (1 - ratio) * (1 - RESERVE[width]) - 1e-9
    choices = _choices(family, width)
    rules: dict[str, str] = next((c for c in choices if c["ratio"] >= least), choices[-1])["rules"]
    return rules
