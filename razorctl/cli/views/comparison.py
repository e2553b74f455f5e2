"""The output of `compare`: the table of a comparison, or its rows as CSV."""

import csv
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from razorctl.cli.views import common as views
from razorctl.cli.views.terminal import Lines, data_stream
from razorctl.config.tasks import LEAST
from razorctl.planning.candidates import CONTEXT, FRAGMENTATION
from razorctl.training.comparing.advice import sentence
from razorctl.units import count, percent, size

MEMORY = {"saved_bytes": "stored", "traced_peak_bytes": "peak", "peak_bytes": "peak"}
MIB, GIB = ("MiB", 2.0**20), ("GiB", 2.0**30)
_SHARES = {"f1": "F1", "micro_f1": "micro F1", "mean_average_precision": "mAP"}
_SHARES |= {"mean_iou": "mean IoU", "top5_accuracy": "top-5 accuracy"}
_SHARES |= {name: name for name in ("accuracy", "precision", "recall")}
_SHARES |= {name: name.replace("_", " ") for name in ("balanced_accuracy", "exact_match")}
_SHARES |= {"mrr": "MRR", "ndcg_at_10": "nDCG@10"}
_SHARES |= {f"recall_at_{rank}": f"recall@{rank}" for rank in (1, 5, 10)}
_SHARES |= {"map": "box mAP", "map_50": "box mAP@50", "map_75": "box mAP@75", "mar_100": "mAR@100"}
_SHARES |= {f"map_{size}": f"mAP {size}" for size in ("small", "medium", "large")}
_CORRELATIONS = {"pearson": "Pearson r", "spearman": "Spearman r", "matthews": "Matthews"}
SCORES = {  # figure -> as in Columns
    "perplexity": ("perplexity", 1.0, "{:.2f}"),
    "loss": ("loss", 1.0, "{:.4f}"),
    **{name: (name.upper(), 1.0, "{:.4g}") for name in ("mse", "rmse", "mae")},
    "r2": ("R2", 1.0, "{:.4f}"),
    **{figure: (f"{head}\n%", 0.01, "{:.2f}") for figure, head in _SHARES.items()},
    **{figure: (f"{head}\nx 100", 0.01, "{:.2f}") for figure, head in _CORRELATIONS.items()},
}
LABEL = 14  # characters of a label before it is folded
# Columns that are left out on a narrow terminal, in this order.
SPARE = ("epoch_seconds", "speedup_vs_full", "time_to_target", "memory_vs_full")
Columns = dict[str, tuple[str, float, str]]  # figure -> (head, size of its unit, format)


def show(document: dict[str, Any], memories: dict[str, str] | None = None) -> None:
    """Prints the table of `compare`: a row for each method, the best figures in bold.

    memories: as in `columns_of`; None is the stored bytes and the column of `document["memory"]`.
    """
    shown = ("saved_bytes", document["memory"])
    columns = columns_of(document, memories or {name: MEMORY[name] for name in shown})
    table, left_out = _table(document, columns), list[str]()
    for name in SPARE:
        table.columns[1].max_width = LABEL
        if views.table_width(table) <= views.out.width:
            break
        left_out.append(columns.pop(name)[0].split("\n")[0])
        table = _table(document, columns)
    table.columns[1].max_width = None
    views.out.print(table, "", sep="\n")
    for row in document["rows"]:
        if row["error"] is not None:
            text = f"{row['label']}: {row['error']}"
            views.out.print(text, style="red", highlight=False, markup=False)
    notes = explanation(document, of_target="time_to_target" in columns)
    if left_out:
        notes += f"Left out for width: {', '.join(left_out)}; --json has all."
    views.out.print(notes, style="dim", highlight=False)
    views.out.print(sentence(document["take"]), highlight=False, markup=False)
    if document["command"] is not None:
        views.line(document["command"])


def columns_of(document: dict[str, Any], memories: dict[str, str]) -> Columns:
    """The columns of a comparison.

    memories: names in MEMORY with their heads.
    """
    rows, columns = document["rows"], Columns()
    if len({row["steps"] for row in rows} - {None}) > 1:
        columns["steps"] = ("steps", 1.0, "{:,.0f}")
    columns |= {name: _column(rows, name, head, MIB, GIB) for name, head in memories.items()}
    return columns | {
        "memory_vs_full": ("of full\n%", 0.01, "{:,.1f}"),
        "step_seconds": _column(rows, "step_seconds", "step", ("ms", 1e-3), ("s", 1)),
        "speedup_vs_full": ("speed\nx full", 1, "{:.2f}x"),
        "epoch_seconds": _column(rows, "epoch_seconds", "epoch", ("s", 1), ("min", 60)),
        "score": SCORES[document["metric"] or "accuracy"],
        "time_to_target": _column(rows, "time_to_target", "target", ("s", 1), ("min", 60)),
    }


def cell(row: dict[str, Any], name: str, columns: Columns) -> str:
    """A value of a row in the format of its column; a dash for None."""
    _, unit, form = columns[name]
    text = "-" if row[name] is None else form.format(row[name] / unit)
    if name == "score" and row["score_std"] is not None:
        text += f" ± {row['score_std'] / unit:.2f}"
    return text


def explanation(document: dict[str, Any], of_target: bool) -> str:
    """The explanation of the table's marks and columns.

    of_target: whether it has the column "target".
    """
    target, rows = document["target"], document["rows"]
    budget, memory = document["budget_bytes"], "stored for backward, traced"
    if any(row["compile"] for row in rows):
        memory += " without compiling"
    if any(row["activation_memory_budget"] is not None for row in rows):
        memory += " or its memory budget"
    by = {
        "saved_bytes": "stored",
        "traced_peak_bytes": "peak, traced for a step on a card",
        "peak_bytes": "peak, measured",
    }[document["memory"]]
    head, _, form = SCORES[document["metric"] or "accuracy"]
    score = head.split("\n")[0]
    notes = f"Bold: best. *: Pareto front of memory, step time and {score}. Memory: {by}. "
    notes += f"stored: {memory}. "
    if any(row["fits"] is False for row in rows):
        notes += (
            f"does not fit: peak + {percent(FRAGMENTATION)} for fragmentation + {size(CONTEXT)} "
            f"for the CUDA context exceed {size(budget)}. "
        )
    if target is not None and of_target:
        bound = f"{percent(target, 2) if head.endswith('%') else form.format(100 * target)} or more"
        if document["metric"] in LEAST:
            bound = f"{form.format(target)} or less"
        notes += f"target: training time until {score} stays at {bound}. "
    if eager := [row["label"] for row in rows if row["compile"] and not row["compiled"]]:
        notes += f"Not compiled: {', '.join(eager)}. "
    return notes


def title(document: dict[str, Any]) -> str:
    """The model and the data set of a comparison."""
    return views.title(document["model"], document["dataset"])


def shared_settings(document: dict[str, Any]) -> str:
    """The settings that all runs have in common, such as "batch 64, 100 steps, fp32, 2 seeds"."""
    shared, words = document["shared"], []
    if "batch_size" in shared:
        words.append(f"batch {shared['batch_size']}")
    if "steps" in shared:
        words.append(count(shared["steps"], "step"))
    if "precision" in shared:
        words.append(shared["precision"])
    if shared.get("compile"):
        words.append("compiled")
    if shared.get("cuda_graphs"):
        words.append("CUDA graphs")
    return ", ".join([*words, count(len(document["seeds"]), "seed"), *document["devices"]])


def _table(document: dict[str, Any], columns: Columns) -> Table:
    """The table of the rows of the document."""
    table = Table(
        title=escape(f"{title(document)}, {shared_settings(document)}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column()
    table.add_column("method", overflow="fold")
    for head, _, _ in columns.values():
        table.add_column(head, justify="right", no_wrap=True)
    for row in document["rows"]:
        misfit = "\n[red]does not fit[/]" if row["fits"] is False else ""
        cells = ["*" if row["pareto"] else "", escape(row["label"]) + misfit]
        for name in columns:
            text = cell(row, name, columns)
            cells.append(f"[bold]{text}[/]" if name in row["best"] else text)
        table.add_row(*cells, style=None if row["seeds"] else "dim")
    return table


def _column(
    rows: list[dict[str, Any]], name: str, head: str, *units: tuple[str, float]
) -> tuple[str, float, str]:
    """The head, unit and format of a column; its largest value is at least 1 in the unit."""
    largest = max((row[name] for row in rows if row[name] is not None), default=0)
    unit, size = next((u for u in reversed(units) if largest >= u[1]), units[0])
    return f"{head}\n{unit}", size, "{:,.1f}" if size == units[0][1] else "{:,.2f}"


def show_csv(document: dict[str, Any]) -> None:
    """Prints the rows as CSV, without columns of lists."""
    rows = document["rows"]
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    writer = csv.DictWriter(Lines(data_stream()), names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
