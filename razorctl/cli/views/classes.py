"""The figures of each class, for one model and for the rows of a comparison."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from razorctl import units
from razorctl.cli.views import common as views

if TYPE_CHECKING:
    from razorctl.training.comparing.finished_run import FinishedRun

SHOWN = 20  # classes in a table, the ones of least F1
MATRIX = 12  # classes whose confusion matrix is shown
Matrix = Sequence[Sequence[int]]


def show(names: Sequence[str], figures: Mapping[str, Any]) -> None:
    """Prints a model's figures of each class, and its confusion matrix of up to MATRIX classes.

    figures: a `metrics.ByClass` as a JSON value.
    """
    heads = {"precision": "precision", "recall": "recall", "f1": "F1"}
    if figures.get("average_precision") is not None:
        heads["average_precision"] = "average precision"
    table = _table("class", ("labels", *heads.values()))
    numbers = _lowest(figures["f1"])
    for number in numbers:
        shares = (f"{figures[name][number]:.4f}" for name in heads)
        table.add_row(escape(names[number]), f"{figures['labels'][number]:,}", *shares)
    views.out.print(table)
    _note_left_out(len(names) - len(numbers), "; --json has all")
    if figures["confusion"] is None or len(names) > MATRIX:
        return
    table = _matrix(names, names, figures["confusion"])
    if views.table_width(table) > views.out.width:
        numbered = [f"{number}: {name}" for number, name in enumerate(names, 1)]
        table = _matrix(numbered, [*map(str, range(1, len(names) + 1))], figures["confusion"])
    views.out.print(table)


def _table(first: str, heads: Sequence[str]) -> Table:
    """A table of names, under the head `first`, and of figures."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(escape(head), justify="right", no_wrap=True)
    return table


def _matrix(names: Sequence[str], heads: Sequence[str], confusion: Matrix) -> Table:
    """The table of a confusion matrix; heads: the heads of its columns."""
    table = _table("label / predicted", heads)
    for number, name in enumerate(names):
        cells = [f"{count:,}" for count in confusion[number]]
        cells[number] = f"[bold]{cells[number]}[/]"
        table.add_row(escape(name), *cells)
    return table


def _note_left_out(classes: int, more: str = "") -> None:
    if classes:
        text = f"Left out: {units.count(classes, 'class')} with the same or a higher F1{more}."
        views.out.print(text, style="dim")


def show_compared(groups: Sequence[tuple[str, Sequence["FinishedRun"]]]) -> None:
    """Prints the F1 of each class for each row of a comparison, with its best weights.

    F1 is a mean over seeds, and the confusion matrix of a row is a sum over seeds. Prints nothing
    if a run has no classes. groups: the label and the runs of each row.
    """
    by_class: list[list[Any]] = [[run.result.get("by_class") for run in runs] for _, runs in groups]
    classes = {tuple(run.result["classes"]) for _, runs in groups for run in runs}
    if len(classes) != 1 or not all(map(all, by_class)):
        return
    (names,) = classes
    f1 = [
        [fmean(of_class) for of_class in zip(*(seed["f1"] for seed in seeds), strict=True)]
        for seeds in by_class
    ]
    numbers = _lowest([min(of_class) for of_class in zip(*f1, strict=True)])
    table = _table("class", ("labels", *(label for label, _ in groups)))
    table.title = "F1 of classes in %, by the best weights"
    for number in numbers:
        shares = (f"{100 * column[number]:.2f}" for column in f1)
        table.add_row(escape(names[number]), f"{by_class[0][0]['labels'][number]:,}", *shares)
    views.out.print(table)
    _note_left_out(len(names) - len(numbers))
    for (label, _), seeds in zip(groups, by_class, strict=True):
        matrices = [seed["confusion"] for seed in seeds]
        if None not in matrices and len(names) <= MATRIX:
            cells = (
                [sum(cell) for cell in zip(*rows, strict=True)]
                for rows in zip(*matrices, strict=True)
            )
            table = _matrix(names, names, list(cells))
            table.title = escape(f"{label}: confusion matrix")
            views.out.print(table)


def _lowest(f1: Sequence[float]) -> list[int]:
    """The SHOWN classes of least F1, in the order of their numbers."""
    return sorted(sorted(range(len(f1)), key=lambda number: (f1[number], number))[:SHOWN])
