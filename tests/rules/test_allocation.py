"""The rules of `razor` for every ratio, as the measured table has them."""

from functools import cache
from itertools import groupby, pairwise
from typing import Any

import pytest
from allocate import ENOUGH, finer
from pages import load

from razorctl.methods import FAMILIES, Family
from razorctl.rules.allocation import RESERVE, _best, _choices

EVERY = [(family, width) for family in FAMILIES for width in RESERVE]
RATIOS = [number / 1000 for number in range(990)]


@cache
def picked(family: Family, width: str) -> list[dict[str, Any]]:
    """The choices for RATIOS, of several ratios in a row once."""
    by_rules = {str(choice["rules"]): choice for choice in _choices(family, width)}
    taken = (str(_best(family, width, ratio)) for ratio in RATIOS)
    return [by_rules[rules] for rules, _ in groupby(taken)]


@pytest.mark.parametrize(("family", "width"), EVERY)
def test_a_larger_ratio_keeps_no_more_and_errs_no_less(family: Family, width: str) -> None:
    for less, more in pairwise(picked(family, width)):
        assert more["ratio"] >= less["ratio"]
        assert more["error"] >= less["error"]


@pytest.mark.parametrize(("family", "width"), EVERY)
def test_no_larger_ratio_that_is_close_keeps_more_bits(family: Family, width: str) -> None:
    choices = _choices(family, width)
    for number, choice in enumerate(choices):
        for other in choices[number + 1 :]:
            assert not finer(other, choice) or other["error"] > ENOUGH


@pytest.mark.parametrize(("family", "width"), EVERY)
def test_no_choice_is_left_that_keeps_less_and_errs_less_as_it_is_made_again(
    family: Family, width: str
) -> None:
    for choice in picked(family, width):
        for other in load("allocate")["choices"][family][width]:
            if other["level"] <= choice["level"] and other["ratio"] >= choice["ratio"]:
                assert other["error"] >= choice["error"]
