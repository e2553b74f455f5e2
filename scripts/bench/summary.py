"""Prints the result of gpu.sh as a short table.

python3 scripts/bench/summary.py scripts/bench/results/step_cuda.json
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from pages import Row, figures

LINEAR = (0.5, 0.9)  # the ratios that are shown of one linear layer


def figure(row: Row, key: str, unit: float = 1, form: str = ".2f") -> str:
    return figures(row, [(key, unit, form)])[0]


def phases(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        groups = sorted(row.get("groups", {}).items(), key=itemgetter(1), reverse=True)
        longest = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in groups[:5])
        took = figure(row, "step_seconds", 1e-3, ".1f")
        memory = figure(row, "reserved_bytes", 2**20, ",.0f")
        yield f"  {row['case']:28}{took:>7}{memory:>9}  {row['error'] or longest}"


def products(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each product: its ways, the fastest first."""
    for row in rows:
        ways = sorted(row.get("seconds", {}).items(), key=itemgetter(1))
        took = (f"{way} {1e3 * s:.3f} ({row['work'] / s / 1e12:.1f})" for way, s in ways)
        failed = (f"{way}: {why}" for way, why in row.get("failed", {}).items())
        yield f"  {row['case']:38}  {row['error'] or ', '.join((*took, *failed))}"


def layers(rows: Iterable[Row]) -> Iterator[str]:
    for row in (row for row in rows if row["ratio"] in LINEAR and row["method"] != "full"):
        name = f"{row['method']} at {row['ratio']}"
        both = figure(row, "both_vs_full")
        yield f"  {name:47} {row['precision']:5}{both:>9}  {row['error'] or ''}".rstrip()


def steps(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        cells = (
            figure(row, "step_time_vs_full"),
            figure(row, "step_time_vs_full_compiled"),
            figure(row, "step_seconds", 1e-3, ".1f"),
            figure(row, "peak_bytes", 2**20, ",.0f"),
        )
        line = f"  {row['case']:47} {row['precision']:5}" + "".join(f"{cell:>9}" for cell in cells)
        yield f"{line}  {row['error'] or ''}".rstrip()


def frontier(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each method: the time and peak at each ratio."""
    cells_of: dict[str, list[str]] = {}
    for row in rows:
        name, _, ratio = row["case"].partition(" at ")
        peak = figure(row, "peak_bytes", 2**20, ",.0f")
        cell = row["error"] or f"{figure(row, 'step_time_vs_full')} / {peak}"
        cells_of.setdefault(name, []).append(f"{ratio}: {cell}" if ratio else cell)
    yield from (f"  {name:24}  {', '.join(cells)}" for name, cells in cells_of.items())


def first(rows: Iterable[Row]) -> Iterator[str]:
    yield f"{'one training step':35}{'cosine to fp32':>16}{'to full':>9}{'seconds':>9}"
    for row in rows:
        cells = (
            f"{figure(row, 'cosine to full, fp32', form='.4f'):>16}",
            f"{figure(row, 'cosine to full', form='.4f'):>9}",
            f"{figure(row, 'second_seconds', form='.3f'):>9}",
        )
        failed = "; ".join(f"{name}: {why}" for name, why in row["failed"].items())
        broken = "" if row["finite"] or row["error"] else "not finite"
        yield f"  {row['case']:33}{''.join(cells)}  {row['error'] or broken or failed}".rstrip()


def tests(name: str, rows: dict[str, Row]) -> Iterator[str]:
    """How many tests ended in which way, and which failed."""
    counts = Counter(row["outcome"] for row in rows.values())
    yield f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
    for test, row in rows.items():
        if row["error"]:
            yield f"  {test}: {row['error'].splitlines()[0]}"


def text(name: str, document: Row) -> Iterator[str]:
    """The lines of a part's table."""
    rows = document["rows"]
    if "device" in document:
        yield document["device"]
    if name == "first":
        yield from first(rows)
    elif name in ("layers", "kernels"):
        yield from tests(name, rows)
    elif name == "step":
        columns = ("vs full", "compiled", "ms", "peak MiB")
        yield f"{'whole steps':55}" + "".join(f"{name:>9}" for name in columns)
        yield from steps(rows)
    elif name == "linear":
        yield f"{'one linear layer, both passes':55}{'vs full':>9}"
        yield from layers(rows)
    elif name == "frontier":
        yield "every ratio: time vs full / peak MiB"
        yield from frontier(rows)
    elif name == "products":
        yield "milliseconds by every way, and T operations or bytes a second"
        yield from products(rows)
    else:
        yield "milliseconds of a step, reserved MiB, and milliseconds of its kernels"
        yield from phases(rows)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    if not file.exists():
        sys.exit(f"{file} was not written")
    print("\n".join(text(file.stem.partition("_")[0], json.loads(file.read_text()))))
