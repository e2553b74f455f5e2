"""The output of `profile`: tables of bytes and of times."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from razorctl.cli.views import common as views
from razorctl.cli.views.common import recipe_summary
from razorctl.registry import starred
from razorctl.units import duration, percent, size

Bytes = dict[tuple[str, ...], tuple[int, int]]  # labels -> (bytes stored, the same of `full`)
NAME = 16  # least characters of the name of a module
LARGEST = 15  # rows of modules; the same module of all blocks is one row
PHASES = {
    "data_s": "creating and moving a random batch",
    "forward_s": "with the loss, without packing",
    "sampling_s": "choosing and packing activations",
    "backward_s": "",
    "optimizer_s": "with clipping",
}
COMPILED = {"forward_s": "with the loss and packing", "sampling_s": "in forward"}
CAPTURED = {
    "forward_s": "with the loss, packing and backward, in CUDA graphs",
    **dict.fromkeys(("sampling_s", "backward_s"), "in forward"),
}


def show(result: dict[str, Any]) -> None:
    """Prints the tables of `profile`: bytes by layer kind and by module, peak, time by phase.

    The document of an nn.Module has only bytes by module.
    """
    title = result["model"]
    if "phases" not in result:
        text = f"{title}: {recipe_summary(result['recipe'])}, {result['precision']}"
        views.out.print(text, highlight=False, markup=False)
        rows = _largest(result["rows"], "type")
        _show_bytes("activations stored for backward, traced", ("module", "", "class"), rows)
        return
    if result["dataset"]:
        title = views.title(title, result["dataset"])
    words = [recipe_summary(result["recipe"]), f"batch {result['batch_size']:,}"]
    words += [result["precision"], result["optimizer"]]
    eager = ""
    if result["compiled"]:
        words.append("compiled")
        eager = " without compiling"
    if result["cuda_graphs"]:
        words.append("CUDA graphs")
    text = f"{title}: {', '.join(words)}, on {result['device']}"
    views.out.print(text, highlight=False, markup=False)
    views.out.print(f"packing and int8 GEMMs: {result['kernels']}", highlight=False, markup=False)
    stored, full = result["by_kind"], result["by_kind_full"]
    by_size = sorted(full, key=full.__getitem__, reverse=True)
    kinds: Bytes = {(kind,): (stored[kind], full[kind]) for kind in by_size}
    title = f"activations stored for backward, traced{eager}"
    _show_bytes(title, ("kind of layer",), kinds)
    _show_bytes("by module", ("module", "", "kind"), _largest(result["rows"], "kind"))
    _show_peaks(result["peak_bytes"], eager)
    _show_times(result)


def _show_peaks(peaks: dict[str, int | None], eager: str) -> None:
    """Prints the peaks of a step; eager: a remark on the traced one."""
    table = _table("peak of a step", "", "bytes")
    for name, count in peaks.items():
        if count is not None:
            remark = eager if name == "traced" else ""
            table.add_row(f"{name.replace('_', ', ')}{remark}", size(count))
    views.out.print(table)


def _show_times(result: dict[str, Any]) -> None:
    """Prints the times of the phases of a step."""
    table = _table(f"time of a step, median of {result['steps']:,}", "phase", "time", "share", "")
    for name, note in PHASES.items():
        seconds = result["phases"][name]
        if result["dataset"] and name == "data_s":
            note = "reading, transforming and moving rows"
        if result["compiled"]:
            note = COMPILED.get(name, note)
        elif result["cuda_graphs"]:
            note = CAPTURED.get(name, note)
        share = percent(seconds / result["step_s"])
        table.add_row(name.removesuffix("_s"), duration(seconds), share, f"[dim]{note}")
    table.add_section()
    table.add_row("step", duration(result["step_s"]))
    views.out.print(table)


def _largest(rows: list[dict[str, Any]], key: str) -> Bytes:
    """The bytes of the LARGEST groups of rows, and of all other rows.

    Modules whose names differ in numbers alone are a group, such as blocks.0.fc and blocks.1.fc.
    key: "kind" (of layer), or "type" (class), by which a group must agree too. With "type" the last
    parts of names must be equal: 0.0 and 1.0 are a group, 0.0 and 0.1 are none.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        name = starred(row["module"])
        if key == "type":
            outer, dot, last = row["module"].rpartition(".")
            name = starred(outer + dot) + last
        groups.setdefault((name, row[key]), []).append(row)
    sums: Bytes = {}
    for (name, kind), group in groups.items():
        number = f"{len(group)} x" if len(group) > 1 else ""
        labels = (name if number else group[0]["module"]) or "(the model)", number, kind
        sums[labels] = _sums((row["saved_bytes"], row["full_saved_bytes"]) for row in group)
    largest = sorted(sums, key=sums.__getitem__, reverse=True)
    shown = {labels: sums[labels] for labels in largest[:LARGEST]}
    if rest := largest[LARGEST:]:
        shown["others", "", ""] = _sums(sums[labels] for labels in rest)
    return shown


def _sums(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return sum(first), sum(second)


def _show_bytes(title: str, labels: tuple[str, ...], entries: Bytes) -> None:
    """Prints a row for each entry and their sum; a narrow terminal gets fewer columns."""
    columns = (*labels, "full", "stored", "smaller", "share")
    last = ("kind", "class")
    for left_out in ((), last, (*last, "share"), (*last, "share", "smaller")):
        shown = [name for name in columns if name not in left_out]
        room = views.out.width - views.table_width(
            _bytes_table(title, shown, columns, entries, NAME)
        )
        if room >= 0:
            break
    views.out.print(_bytes_table(title, shown, columns, entries, NAME + max(0, room)))


def _bytes_table(
    title: str, shown: Sequence[str], columns: Sequence[str], entries: Bytes, room: int
) -> Table:
    """The table of the columns `shown`, with names of at most `room` characters."""
    total = _sums(entries.values())
    table = _table(title, *shown)

    def add(labels: Sequence[str], pair: tuple[int, int]) -> None:
        cells = dict(zip(columns, (*labels, *_figures(*pair, total[0])), strict=True))
        table.add_row(*(cells[name] for name in shown))

    for (name, *others), pair in entries.items():
        # Long names differ in their ends.
        add((name if len(name) <= room else f"…{name[1 - room :]}", *others), pair)
    table.add_section()
    add(("total", *[""] * (len(columns) - 5)), total)
    return table


def _figures(stored: int, full: int, total: int) -> tuple[str, ...]:
    times = f"{full / stored:.1f}x" if full and stored else "-"
    return size(full), size(stored), times, percent(stored / total) if total else "-"


def _table(title: str, *columns: str) -> Table:
    """A table whose columns of figures are aligned to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        figures = name in ("full", "stored", "smaller", "share", "bytes", "time")
        table.add_column(name, justify="right" if figures else "left", no_wrap=bool(name))
    return table
