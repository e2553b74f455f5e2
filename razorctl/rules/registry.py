"""Rules by name: the class of each, and a function that builds it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from razorctl.ops.packing import BITS
from razorctl.rules.allocation import Names
from razorctl.rules.base import Rule, Rules, survivors
from razorctl.rules.dense import Dense, Half
from razorctl.rules.prune import Columns, DrawnColumns, TopK
from razorctl.rules.quantized import Quantized
from razorctl.sampling.samplers import Bandit, Proportional, Sampler


@dataclass(frozen=True)
class RuleSettings:
    """The activation that a rule is built for, and the settings of a recipe.

    Args:
        columns: the number of columns of the activation.
        density: the share of the activation that a pruning rule stores.
        unbiased: whether drawn columns are scaled by 1 / p.
    """

    columns: int
    density: float
    unbiased: bool = False


@dataclass(frozen=True)
class RuleEntry:
    """A class of rules, and the function that builds one."""

    rule: type[Rule]
    build: Callable[[RuleSettings], Rule]


def _drawn(sampler: type[Sampler]) -> RuleEntry:
    def build(settings: RuleSettings) -> Rule:
        count = survivors(settings.columns, settings.density)
        return DrawnColumns(sampler(settings.columns, count), settings.unbiased)

    return RuleEntry(DrawnColumns, build)


def _quantized(bits: int, **options: Any) -> RuleEntry:
    return RuleEntry(Quantized, lambda settings: Quantized(bits, **options))


RULES: dict[str, RuleEntry] = {
    "dense": RuleEntry(Dense, lambda settings: Dense()),
    "half": RuleEntry(Half, lambda settings: Half()),
    "topk": RuleEntry(TopK, lambda settings: TopK(settings.density)),
    **{f"{bits}-bit": _quantized(bits) for bits in BITS},
    **{f"{bits}-bit-stochastic": _quantized(bits, stochastic=True) for bits in BITS},
    **{f"{bits}-bit-again": _quantized(bits, again=True) for bits in BITS},
    **{f"{bits}-bit-blocks-again": _quantized(bits, rows=128, again=True) for bits in BITS},
    **{f"{bits}-bit-blocks": _quantized(bits, rows=128) for bits in BITS},
    "columns-norm": RuleEntry(Columns, lambda settings: Columns(settings.density)),
    "columns-uniform": _drawn(Sampler),
    "columns-bandit": _drawn(Bandit),
    "columns-proportional": _drawn(Proportional),
}


def build(names: Names, settings: RuleSettings) -> Rules:
    """The rules of a layer by their names; equal names give the same object."""
    wide = RULES[names.wide].build(settings)
    return Rules(wide, wide if names.narrow == names.wide else RULES[names.narrow].build(settings))
