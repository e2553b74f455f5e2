"""The figures of each class, of one model and of several side by side."""

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

SHOWN = 20  # classes in a table; of more, those of the least F1
MATRIX = 12  # classes whose confusion matrix is shown
Matrix = Sequence[Sequence[int]]


def show(names: Sequence[str], figures: Mapping[str, Any]) -> None:
    """Prints a table of a model's figures of each class, and the confusion matrix of few.

    figures: a `metrics.ByClass` as a JSON value.
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("class", overflow="fold")
    for head in ("labels", "precision", "recall", "F1"):
        table.add_column(head, justify="right")
    numbers = _lowest(figures["f1"])
    for at in numbers:
        shares = (f"{figures[name][at]:.4f}" for name in ("precision", "recall", "f1"))
        table.add_row(escape(names[at]), f"{figures['labels'][at]:,}", *shares)
    views.out.print(table)
    if left := len(names) - len(numbers):
        views.out.print(
            f"Left out: {units.count(left, 'class')} of no lower F1; --json has all.", style="dim"
        )
    if figures["confusion"] is None or len(names) > MATRIX:
        return
    table = _matrix(names, names, figures["confusion"])
    if views.table_width(table) > views.out.width:
        numbered = [f"{number}: {name}" for number, name in enumerate(names, 1)]
        table = _matrix(numbered, [*map(str, range(1, len(names) + 1))], figures["confusion"])
    views.out.print(table)


def _matrix(names: Sequence[str], heads: Sequence[str], confusion: Matrix) -> Table:
    """The table of a confusion matrix; heads: what its columns are called."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("label / guess", overflow="fold")
    for head in heads:
        table.add_column(escape(head), justify="right", no_wrap=True)
    for at, name in enumerate(names):
        cells = [f"{count:,}" for count in confusion[at]]
        cells[at] = f"[bold]{cells[at]}[/]"
        table.add_row(escape(name), *cells)
    return table


def show_compared(groups: Sequence[tuple[str, Sequence["FinishedRun"]]]) -> None:
    """Prints the F1 of each class by the best weights of each row of a comparison.

    It is a mean over seeds, and the confusion matrix of each row is the sum over them. Prints
    nothing if any run has no classes. groups: the label and the runs of each row.
    """
    figures = [[run.result.get("by_class") for run in runs] for _, runs in groups]
    several: list[list[dict[str, Any]]] = [[each for each in g if each] for g in figures]
    classes = {tuple(run.result["classes"]) for _, runs in groups for run in runs}
    if several != figures or len(classes) != 1:
        return
    (names,) = classes
    f1 = [[fmean(of) for of in zip(*(each["f1"] for each in g), strict=True)] for g in several]
    shown = _lowest([min(of_class) for of_class in zip(*f1, strict=True)])
    table = Table(title="F1 of classes in %, by the best weights")
    for head in ("class", "labels", *(label for label, _ in groups)):
        table.add_column(escape(head), justify="left" if head == "class" else "right")
    for at in shown:
        shares = (f"{100 * column[at]:.2f}" for column in f1)
        table.add_row(escape(names[at]), f"{several[0][0]['labels'][at]:,}", *shares)
    views.out.print(table)
    if left := len(names) - len(shown):
        views.out.print(f"Left out: {units.count(left, 'class')} of no lower F1.", style="dim")
    for (label, _), of_seeds in zip(groups, several, strict=True):
        matrices = [each["confusion"] for each in of_seeds if each["confusion"]]
        if matrices and len(names) <= MATRIX:
            sums = [
                [sum(cell) for cell in zip(*rows, strict=True)]
                for rows in zip(*matrices, strict=True)
            ]
            table = _matrix(names, names, sums)
            table.title = escape(f"{label}: what labels were taken for")
            views.out.print(table)


def _lowest(f1: Sequence[float]) -> list[int]:
    """The numbers of the SHOWN classes of the least F1, in their order."""
    return sorted(sorted(range(len(f1)), key=lambda at: (f1[at], at))[:SHOWN])
