"""The rules of `razor`: for a ratio, the close rules with the fewest recomputed operations.

`allocations.json`, written by scripts/bench/allocate.py, lists combinations of rules for rising
ratios, with one rule per layer kind. There are separate lists for models with attention and for
convolutional ones, and for activations of 16 bits ("narrow") and wider ones ("wide"). An entry has
the ratio that it meets on every measured model, its measured gradient error, and its level: at a
higher level more activations are recomputed in the backward pass.
"""

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from razorctl.errors import UsageError
from razorctl.methods import CLOSE, FAMILIES, Family

# The share of the byte budget that is left free for models unlike the measured ones. In 16 bits it
# would cost accuracy.
RESERVE = {"wide": 0.1, "narrow": 0.0}
FILE = Path(__file__).with_name("allocations.json")


class Names(NamedTuple):
    """The names of the rules for wide and for narrow activations, as in `rules.registry.RULES`."""

    wide: str
    narrow: str


def width(precision: str) -> str:
    """The width of the activations at a `Job.precision`, a key of RESERVE."""
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
    """The layer kinds that get their rules from the lists of a family."""
    return set(_best(family, "wide", 0.0))


def closest(family: Family, width: str) -> float:
    """The largest ratio with rules that are predicted to be close, down to three decimals."""
    return close_ratios(family, width)[-1]


@cache
def close_ratios(family: Family, width: str) -> list[float]:
    """The ratios of all rules that are predicted to be close, ascending, down to three decimals."""
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

    Convolutions that cannot meet it get the fewest bits. convolution: their ratio, if another.
    """
    if ratio > largest():
        raise UsageError(f"ratio {ratio:g} cannot be met; the largest possible is {largest():g}.")
    names: dict[str, Names] = {}
    of_convolutions = ratio if convolution is None else convolution
    for family in FAMILIES:
        own = of_convolutions if family == "convolution" else ratio
        wide, narrow = _best(family, "wide", own), _best(family, "narrow", own)
        names |= {kind: Names(rule, narrow[kind]) for kind, rule in wide.items()}
    return names


@cache
def _best(family: Family, width: str, ratio: float) -> dict[str, str]:
    """The rules of the first choice that meets the ratio, else of the last choice."""
    least = 1 - (1 - ratio) * (1 - RESERVE[width]) - 1e-9
    choices = _choices(family, width)
    rules: dict[str, str] = next((c for c in choices if c["ratio"] >= least), choices[-1])["rules"]
    return rules
