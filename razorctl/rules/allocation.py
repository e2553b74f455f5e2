"""The rules of `razor`: for a ratio, those of the fewest operations made again that are close.

`allocations.json`, which scripts/bench/allocate.py writes, lists the combinations of rules that are
worth choosing, with one rule for each layer kind. Layer kinds of models with attention and of
convolutional ones have lists of their own, and so have activations of 16 bits ("narrow") and wider
ones ("wide"). Each combination has the ratio that it meets on every model measured there, its
measured gradient error, and its level: the higher it is, the more activations are made again in
the backward pass.
"""

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from razorctl.errors import UsageError
from razorctl.methods import CLOSE, FAMILIES, Family

# The share of the byte budget that is left free, for models unlike those measured. In 16 bits it
# would cost accuracy.
RESERVE = {"wide": 0.1, "narrow": 0.0}
# Up to this squared relative error of a gradient fewer operations are worth more than less error.
ENOUGH = 0.01
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


@cache
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
    """The rules of the first choice of `front` that meets the ratio, or of the last."""
    least = 1 - (1 - ratio) * (1 - RESERVE[width]) - 1e-9
    choices = front(family, width)
    rules: dict[str, str] = next((c for c in choices if c["ratio"] >= least), choices[-1])["rules"]
    return rules


@cache
def front(family: Family, width: str) -> list[dict[str, Any]]:
    """The choices for rising ratios, without those that a larger ratio's beats.

    So a smaller ratio never has more error, nor fewer bits of anything.
    """
    choices = _choices(family, width)
    of_ratio = {choice["ratio"]: _lowest(choices, choice["ratio"]) for choice in choices}
    picks = list({pick["ratio"]: pick for pick in of_ratio.values()}.values())
    picks.sort(key=itemgetter("ratio"))
    return [c for i, c in enumerate(picks) if not any(_beats(other, c) for other in picks[i + 1 :])]


def _lowest(choices: list[dict[str, Any]], ratio: float) -> dict[str, Any]:
    """The choice of the lowest level among those that meet the ratio and have at most ENOUGH error.

    If none have, that of least error among those that meet the ratio.
    """
    meeting = [choice for choice in choices if choice["ratio"] >= ratio]
    close = [choice for choice in meeting if choice["error"] <= ENOUGH]
    level = min((choice["level"] for choice in close), default=None)
    alike = [choice for choice in close if choice["level"] == level] or meeting
    return min(alike, key=itemgetter("error", "total"))


def _beats(other: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Whether a choice that keeps fewer bytes has less error, or is close and has more bits.

    The errors are those of few models, on some of which fewer bits cost nothing.
    """
    pairs = [(bits, _bits(choice)[kind]) for kind, bits in _bits(other).items()]
    finer = all(more >= less for more, less in pairs) and any(more > less for more, less in pairs)
    return other["error"] < choice["error"] or (finer and other["error"] <= ENOUGH)


def _bits(choice: dict[str, Any]) -> dict[str, int]:
    """The bits of each layer kind; what is made again of norms has theirs."""
    rules: dict[str, str] = choice["rules"]
    again = {kind for kind, rule in rules.items() if rule.endswith("again")} - {"norm"}
    return {kind: int(rules["norm" if kind in again else kind][0]) for kind in rules}
