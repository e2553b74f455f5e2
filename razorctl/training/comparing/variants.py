"""The rows of a grid: each method with every value of the settings that have lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, get_args

from razorctl.config.job import CHOICES, Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.methods import METHODS
from razorctl.planning.plan import command_line

Number = int | float
Lists = Mapping[str, Sequence[Number]]  # setting -> its values


def numeric_settings() -> dict[str, type[Number]]:
    """The settings that may have lists -> the type of a value."""
    kinds: dict[str, type[Number]] = {"ratio": float}
    for field in fields(Job):
        plain = {*(get_args(field.type) or (field.type,))} - {type(None)}
        if plain in ({int}, {float}) and field.name != "seed":
            (kinds[field.name],) = plain
    return kinds


def lists_of(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Number, ...]]]:
    """The flags with single values, and the values of flags with lists, such as `--lr 0.1,0.2`.

    Raises UsageError for a text in place of a number, and for a list where none may be.
    """
    single, lists, kinds = dict(flags), dict[str, tuple[Number, ...]](), numeric_settings()
    for name, text in flags.items():
        words, what = str(text).split(","), name.replace("_", " ")
        if name in CHOICES and len(words) > 1:
            raise UsageError(
                f"{what} {text!r} is a list, and only numbers can have one; give one value."
            )
        if name == "freeze" and len(words) > 1 and all(word.isdecimal() for word in words):
            raise UsageError(f"freeze {text!r} has several numbers of blocks; give one.")
        if text is None or name not in kinds:
            continue
        try:
            numbers = [kinds[name](word) for word in words]
        except ValueError:
            kind = "whole numbers" if kinds[name] is int else "numbers"
            raise UsageError(
                f"{what} {text!r} is not made of {kind}; give one, or several such as 1,2."
            ) from None
        values = tuple(dict.fromkeys(numbers))
        single[name] = values[0] if len(values) == 1 else None
        if len(values) > 1:
            lists[name] = values
    return single, lists


@dataclass(frozen=True)
class GridRow:
    """A method of comparison.NAMES, with a value of each setting that has a list."""

    method: str
    values: tuple[tuple[str, Number], ...] = ()

    @property
    def label(self) -> str:
        """The row in words."""
        return ", ".join([self.method, *(f"{_short(name)} {v:g}" for name, v in self.values)])

    @property
    def name(self) -> str:
        """The row as a part of the name of a directory."""
        words = [self.method, *(f"{_short(name)}-{v:g}" for name, v in self.values)]
        return "-".join(words).replace(" ", "-")


def _short(name: str) -> str:
    return "lr" if name == "learning_rate" else name.replace("_", " ")


def rows_of(methods: Sequence[str], lists: Lists, recipe: Callable[[str], Recipe]) -> list[GridRow]:
    """The rows of a grid; a list of ratios does not apply to methods without a ratio.

    recipe: the function that returns a method's recipe. Raises UsageError for a list of ratios if
    no method has a ratio.
    """
    rows = []
    for method in methods:
        has_ratio = METHODS[recipe(method).method].has_ratio
        names = [name for name in lists if name != "ratio" or has_ratio]
        every = product(*(lists[name] for name in names))
        rows += [GridRow(method, tuple(zip(names, values, strict=True))) for values in every]
    if not any(len(row.values) == len(lists) for row in rows):
        raise UsageError(
            f"a list of ratios needs a method with a ratio, and {', '.join(methods)} have none; "
            "leave --ratio out, or add razor."
        )
    return rows


def command(job: Job, recipe: Recipe, changes: Mapping[str, Any]) -> str:
    """The command that trains a job like a row; changes: settings of the row or a baseline."""
    names = {field.name for field in fields(Job)}
    job = replace(job, **{name: value for name, value in changes.items() if name in names})
    return command_line(job, replace(recipe, seed=job.seed))


def summary(lists: Lists) -> str:
    """The lists of a grid in words, such as "; lr 0.1, 0.2"."""
    return "".join(
        f"; {_short(name)} {', '.join(f'{v:g}' for v in values)}" for name, values in lists.items()
    )
