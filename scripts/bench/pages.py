"""Results, labels, figures and tables, for all scripts that print or write them."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
GIB, MIB = 2**30, 2**20

Row = dict[str, Any]
Cells = Sequence[object]
Column = tuple[str, float, str]  # key of a row, the unit of its figure, and the format

# Case in a results file -> its label, if that is not its name in code quotes.
LABELS = {
    "full": "`full`",
    "full-stored": "`full`, stored attention",
    "accumulate 8": "`full`, 8 micro-batches",
    "torchao int8": "torchao's int8 mixed precision",
    "torchao int8 mixed precision, compiled": "torchao's int8 mixed precision, compiled",
}
ORDER = (
    *("full", "accumulate", "checkpoint", "lora", "bias", "head"),
    *("backrazor", "prebackrazor-", "prebackrazor"),
    *("prebackrazor++", "half", "int8", "int2", "razor", "torchao", "torchao-int8"),
)


def load(name: str) -> Row:
    document: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def label(case: str) -> str:
    """The label of a case: `method`, variant."""
    method, *variants = case.split(", ")
    if rows := re.fullmatch("accumulate ([0-9]+)", method):
        method, variants = "full", [f"micro-batches of {rows[1]}", *variants]
    return LABELS.get(case, ", ".join([f"`{method}`", *variants]))


def ordered(cases: Iterable[str]) -> list[str]:
    """Each case once: exact methods, then the others, each before its variants."""
    return sorted(
        dict.fromkeys(cases), key=lambda case: (ORDER.index(re.split("[ ,]", case)[0]), len(case))
    )


def figures(row: Row, columns: Iterable[Column]) -> list[str]:
    """The figures of a row as text, "-" for those that it lacks."""
    return [
        "-" if row.get(key) is None else format(row[key] / unit, form)
        for key, unit, form in columns
    ]


def table(head: Cells, rows: Iterable[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def listing(rows: Iterable[Row], names: Sequence[str], columns: Sequence[Column]) -> str:
    """The rows as a table of entries by name and of figures, for the terminal."""
    heads = [*names, *(key for key, *_ in columns)]
    return table(
        heads, [[*(row.get(n, "") for n in names), *figures(row, columns)] for row in rows]
    )
