"""What `profile` prints: tables of bytes and of times."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from razorctl.cli.views import common as views
from razorctl.cli.views.common import recipe_summary
from razorctl.config.registry import starred
from razorctl.units import duration, percent, size

Bytes = dict[tuple[str, ...], tuple[int, int]]  # labels -> bytes kept, and kept in full
NAME = 16  # columns of a terminal that the name of a module has at least
LARGEST = 15  # modules, with their like in other blocks, in a row of their own
PHASES = {
    "data_s": "a random batch, made and moved",
    "forward_s": "with the loss, without sampling",
    "sampling_s": "choosing and packing what is kept",
    "backward_s": "",
    "optimizer_s": "with clipping",
}
COMPILED = {"forward_s": "with the loss and sampling", "sampling_s": "in forward"}


def show(result: dict[str, Any]) -> None:
    """The tables of `profile`: bytes by layer kind and by module, the peak, and time by phase.

    Of a model of one's own there are only bytes.
    """
    if "phases" not in result:
        _show_own(result)
        return
    title = result["model"]
    if result["dataset"]:
        title = views.title(title, result["dataset"])
    views.out.print(
        f"{title}: {recipe_summary(result['recipe'])}, batch of {result['batch_size']:,}, "
        f"{result['precision']}, {result['optimizer']}{', compiled' * result['compiled']}, "
        f"on {result['device']}",
        highlight=False,
        markup=False,
    )
    views.out.print(f"packing and int8 GEMMs: {result['kernels']}", highlight=False, markup=False)
    kept, full = result["by_kind"], result["by_kind_full"]
    by_size = sorted(full, key=full.__getitem__, reverse=True)
    kinds: Bytes = {(kind,): (kept[kind], full[kind]) for kind in by_size}
    title = f"kept for backward, traced{' without compiling' * result['compiled']}"
    _show_bytes(title, ("kind of layer",), kinds)
    _show_bytes("the same by module", ("module", "", "kind"), _largest(result["rows"], "kind"))

    table = _table("peak of a step", "", "bytes")
    for name, count in result["peak_bytes"].items():
        if count is not None:
            eager = result["compiled"] and name == "traced"
            words = f"{name.replace('_', ', ')}{' without compiling' * eager}"
            table.add_row(words, size(count))
    views.out.print(table)

    table = _table(f"time of a step, median of {result['steps']:,}", "phase", "time", "share", "")
    for name, note in PHASES.items():
        seconds = result["phases"][name]
        if result["dataset"] and name == "data_s":
            note = "rows read, transformed and moved"
        if result["compiled"] and name in COMPILED:
            note = COMPILED[name]
        share = percent(seconds / result["step_s"])
        table.add_row(name.removesuffix("_s"), duration(seconds), share, f"[dim]{note}")
    table.add_section()
    table.add_row("step", duration(result["step_s"]))
    views.out.print(table)


def _show_own(result: dict[str, Any]) -> None:
    """The tables of bytes of a model of one's own."""
    views.out.print(
        f"{result['model']}: {recipe_summary(result['recipe'])}, {result['precision']}",
        highlight=False,
        markup=False,
    )
    title = "kept for backward, traced"
    _show_bytes(title, ("module", "", "class"), _largest(result["rows"], "type"))


def _largest(rows: list[dict[str, Any]], what: str) -> Bytes:
    """The largest of `rows`, by name, number of them and layer kind; the others in one.

    Those that differ only in the numbers in their names, as the blocks of a model do, are one; in a
    model of one's own, only those whose last name is the same.

    what: the key of the last label: `kind`, or `type` for the class in a model of one's own.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        name = starred(row["module"])
        if what == "type":
            outer, dot, own = row["module"].rpartition(".")
            name = starred(outer + dot) + own
        groups.setdefault((name, row[what]), []).append(row)
    sums: Bytes = {}
    for (name, kind), group in groups.items():
        several = f"{len(group)} x" if len(group) > 1 else ""
        labels = (name if several else group[0]["module"]) or "(the model)", several, kind
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
    """A row for each entry and one for their sum, without what a terminal is too narrow for."""
    columns = (*labels, "full", "kept", "smaller", "share")
    last = ("kind", "class")
    for left_out in ((), last, (*last, "share"), (*last, "share", "smaller")):
        shown = [name for name in columns if name not in left_out]
        room = views.out.width - views.table_width(_of_bytes(title, shown, columns, entries, NAME))
        if room >= 0:
            break
    views.out.print(_of_bytes(title, shown, columns, entries, NAME + max(0, room)))


def _of_bytes(
    title: str, shown: Sequence[str], columns: Sequence[str], entries: Bytes, room: int
) -> Table:
    """The columns to be shown of a table of bytes, names cut to `room` characters."""
    total = _sums(entries.values())
    table = _table(title, *shown)

    def add(labels: Sequence[str], pair: tuple[int, int]) -> None:
        cells = dict(zip(columns, (*labels, *_compared(*pair, total[0])), strict=True))
        table.add_row(*(cells[name] for name in shown))

    for (name, *others), pair in entries.items():
        # The end of a long name tells it from others.
        add((name if len(name) <= room else f"…{name[1 - room :]}", *others), pair)
    table.add_section()
    add(("total", *[""] * (len(columns) - 5)), total)
    return table


def _compared(kept: int, full: int, total: int) -> tuple[str, ...]:
    times = f"{full / kept:.1f}x" if full and kept else "-"
    return size(full), size(kept), times, percent(kept / total) if total else "-"


def _table(title: str, *columns: str) -> Table:
    """A table whose figures stand to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        figures = name in ("full", "kept", "smaller", "share", "bytes", "time")
        table.add_column(name, justify="right" if figures else "left", no_wrap=bool(name))
    return table
