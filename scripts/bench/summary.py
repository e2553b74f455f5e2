"""Prints the result of gpu.sh as a short table.

python3 scripts/bench/summary.py scripts/bench/results/step_cuda.json
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
LINEAR = (0.5, 0.9)  # the ratios that are shown of one linear layer


def figure(row: Row, key: str, unit: float = 1, form: str = ".2f") -> str:
    return "-" if row.get(key) is None else format(row[key] / unit, form)


def kernels(rows: Iterable[Row]) -> Iterator[str]:
    rows = list(rows)
    ratios = [row["measured_vs_implied"] for row in rows if row["measured_vs_implied"]]
    took = f", {median(ratios):.2f} of the implied time (median)" if ratios else ""
    yield f"{len(ratios)} of {len(rows)} kernels are timed{took}"
    yield from (f"  {row['op']} {row['of']}: {row['error']}" for row in rows if row["error"])


def layers(rows: Iterable[Row]) -> Iterator[str]:
    for row in (row for row in rows if row["ratio"] in LINEAR and row["method"] != "full"):
        name = f"{row['method']} at {row['ratio']}"
        both = figure(row, "both_vs_full")
        yield f"  {name:47} {row['precision']:5}{both:>9}  {row['error'] or ''}".rstrip()


def steps(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        figures = (
            figure(row, "step_time_vs_full"),
            figure(row, "step_time_vs_full_compiled"),
            figure(row, "step_seconds", 1e-3, ".1f"),
            figure(row, "peak_bytes", 2**20, ",.0f"),
        )
        line = f"  {row['case']:47} {row['precision']:5}" + "".join(f"{f:>9}" for f in figures)
        yield f"{line}  {row['error'] or ''}".rstrip()


def frontier(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each method: the time and peak at each ratio."""
    found: dict[str, list[str]] = {}
    for row in rows:
        name, _, ratio = row["case"].partition(" at ")
        figures = f"{figure(row, 'step_time_vs_full')} / {figure(row, 'peak_bytes', 2**20, ',.0f')}"
        cell = row["error"] or figures
        found.setdefault(name, []).append(f"{ratio}: {cell}" if ratio else cell)
    yield from (f"  {name:24}  {', '.join(cells)}" for name, cells in found.items())


def text(document: Row) -> Iterator[str]:
    yield f"{document['device']}, {document['model']}, batch {document['batch_size']}"
    if tests := document.get("tests"):
        yield f"tests: {' '.join(tests['summary'])}"
    if "roofline" in document:
        yield from kernels(document["roofline"]["rows"])
    if "linear" in document:
        yield f"{'one linear layer, both passes':55}{'vs full':>9}"
        yield from layers(document["linear"]["rows"])
    if "frontier" in document:
        yield "every ratio: time vs full / peak MiB"
        yield from frontier(document["frontier"]["rows"])
    columns = ("vs full", "compiled", "ms", "peak MiB")
    yield f"{'whole steps':55}" + "".join(f"{name:>9}" for name in columns)
    yield from steps(document["rows"])


if __name__ == "__main__":
    print("\n".join(text(json.loads(Path(sys.argv[1]).read_text()))))
