"""Rules by name, and how each is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from razorctl.ops import buckets
from razorctl.ops.packing import BITS
from razorctl.rules.allocation import Names
from razorctl.rules.base import Rule, Rules, survivors
from razorctl.rules.dense import Dense, Half
from razorctl.rules.derivative import Buckets
from razorctl.rules.prune import Columns, TopK
from razorctl.rules.quantized import Quantized
from razorctl.sampling.samplers import Bandit, Proportional, Sampler


@dataclass(frozen=True)
class Wanted:
    """What a rule is built for: the columns of the activation, and the density of a recipe.

    unbiased: whether drawn columns are scaled by 1 / p. function: the activation function whose
    input is packed, by its name in `ops.functions.FUNCTIONS`.
    """

    columns: int
    density: float
    unbiased: bool = False
    function: str = "gelu"


def _drawn(sampler: type[Sampler]) -> Callable[[Wanted], Rule]:
    def build(wanted: Wanted) -> Rule:
        drawn = sampler(wanted.columns, survivors(wanted.columns, wanted.density))
        return Columns(wanted.density, drawn, wanted.unbiased)

    return build


def _quantized(bits: int, **options: Any) -> Callable[[Wanted], Rule]:
    return lambda wanted: Quantized(bits, **options)


def _buckets(bits: int) -> Callable[[Wanted], Rule]:
    return lambda wanted: Buckets(bits, wanted.function)


RULES: dict[str, Callable[[Wanted], Rule]] = {
    "dense": lambda wanted: Dense(),
    "half": lambda wanted: Half(),
    "topk": lambda wanted: TopK(wanted.density),
    **{f"{bits}-bit": _quantized(bits) for bits in BITS},
    **{f"{bits}-bit-stochastic": _quantized(bits, stochastic=True) for bits in BITS},
    **{f"{bits}-bit-blocks": _quantized(bits, rows=128) for bits in BITS},
    **{f"{bits}-bit-derivative": _buckets(bits) for bits in buckets.BITS},
    "columns-norm": lambda wanted: Columns(wanted.density),
    "columns-uniform": _drawn(Sampler),
    "columns-bandit": _drawn(Bandit),
    "columns-proportional": _drawn(Proportional),
}


def build(names: Names, wanted: Wanted) -> Rules:
    """The rules of a layer by their names; rules of one name are one."""
    wide = RULES[names.wide](wanted)
    if names.narrow is None:
        return Rules(wide, None)
    return Rules(wide, wide if names.narrow == names.wide else RULES[names.narrow](wanted))
