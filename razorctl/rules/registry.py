"""Rules by name, and how each is built."""

from collections.abc import Callable
from typing import Any

from razorctl.ops import buckets
from razorctl.ops.quantize import BITS
from razorctl.rules.base import Rule, survivors
from razorctl.rules.dense import Dense, Half
from razorctl.rules.derivative import Buckets
from razorctl.rules.prune import Columns, TopK
from razorctl.rules.quantized import ByPrecision, Quantized, Unmet
from razorctl.sampling.samplers import Bandit, Proportional, Sampler


def _drawn(sampler: type[Sampler]) -> Callable[[int, float, bool], Rule]:
    def build(columns: int, density: float, unbiased: bool) -> Rule:
        return Columns(density, sampler(columns, survivors(columns, density)), unbiased)

    return build


def _quantized(bits: int, **options: Any) -> Callable[[int, float, bool], Rule]:
    return lambda columns, density, unbiased: Quantized(bits, **options)


def _buckets(bits: int) -> Callable[[int, float, bool], Rule]:
    return lambda columns, density, unbiased: Buckets(bits)


# Name -> builder from (columns of the activation, density, unbiased).
RULES: dict[str, Callable[[int, float, bool], Rule]] = {
    "dense": lambda columns, density, unbiased: Dense(),
    "half": lambda columns, density, unbiased: Half(),
    "topk": lambda columns, density, unbiased: TopK(density),
    **{f"{bits}-bit": _quantized(bits) for bits in BITS},
    **{f"{bits}-bit-stochastic": _quantized(bits, stochastic=True) for bits in BITS},
    **{f"{bits}-bit-blocks": _quantized(bits, rows=128) for bits in BITS},
    **{f"{bits}-bit-derivative": _buckets(bits) for bits in buckets.BITS},
    "columns-norm": lambda columns, density, unbiased: Columns(density),
    "columns-uniform": _drawn(Sampler),
    "columns-bandit": _drawn(Bandit),
    "columns-proportional": _drawn(Proportional),
}


def build(name: str, columns: int, density: float, unbiased: bool = False) -> Rule:
    """The rule of a name in RULES, or of two as `ByPrecision`: "WIDE/NARROW"."""
    wide, _, narrow = name.partition("/")
    rule = RULES[wide](columns, density, unbiased)
    if narrow in ("", wide):
        return rule
    if narrow == "unmet":
        return ByPrecision(rule, Unmet())
    return ByPrecision(rule, RULES[narrow](columns, density, unbiased))
