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
LOSS_EVERY = 10  # steps between two losses that accuracy.py keeps

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
# How long a command takes, if its script does not say.
TAKES = {"step_cpu": "ten minutes", "frontier_cpu": "ten minutes"}
# Results that need the extra of that name.
BENCH = ("step_cpu", "gradients")
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


def ranged(row: Row, form: str, over: float = 1.0) -> str:
    """The predicted seconds of a step over some others, from least to most if they differ."""
    low, high = (format(row[f"step_seconds_{end}"] / over, form) for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def figures(row: Row, columns: Iterable[Column]) -> list[str]:
    """The figures of a row as text, "-" for those that it lacks."""
    return [
        "-" if row.get(key) is None else format(row[key] / unit, form)
        for key, unit, form in columns
    ]


def table(head: Cells, rows: Iterable[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def source(name: str, document: Row) -> str:
    """The list above a table: file, date, command, device, versions."""
    command, _, remark = document.get("command", f"scripts/bench/{name}.py").partition("; ")
    command = command if ".sh" in command else f".venv/bin/python {command}"
    notes = [
        remark,
        "needs the `bench` extra" if name in BENCH or name.startswith("accuracy") else "",
    ]
    notes.append(f"takes {TAKES[name]}" if name in TAKES else "")
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items() if k != "razorctl")
    return (
        f"- file: [`results/{name}.json`](results/{name}.json), {document['date']}\n"
        f"- command: {', '.join([f'`{command}`', *filter(None, notes)])}\n"
        f"- device: {document.get('device', 'none: traced')}; {versions}\n\n"
    )
