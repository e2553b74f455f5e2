"""The tables and figures of the pages, from results/*.json. report.py writes them there."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from statistics import median
from textwrap import fill
from typing import Any

import pages
from pages import GIB, MIB, RESULTS, Column, Row, label, load, ordered, table

NONE = "\N{EN DASH}"
# Results that need the extra of that name.
BENCH = ("step_cpu", "gradients", "task_gradients", "allocate")
BOTH = ("fp32", "bf16")
RETRIEVAL = max(path.stem for path in RESULTS.glob("retrieval-*.json"))
PAIR = (("saved_bytes", MIB, ",.0f"), ("peak_bytes", MIB, ",.0f"))


def made(name: str) -> str:
    """The command that made a result, its file, date, device and versions."""
    document = load(name)
    versions = (f"{k} {v}" for k, v in document["versions"].items() if k != "razorctl")
    more = ", needs the `bench` extra" if name in BENCH else ""
    device = document.get("device", "any CPU")
    return (
        f"- command: `.venv/bin/python {document['command']}`{more}\n"
        f"- result: [`results/{name}.json`](results/{name}.json), {document['date']}\n"
        f"- device: {device}\n- versions: {', '.join(versions)}\n"
    )


def prose(text: str) -> str:
    return fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"


def folded(summary: str, text: str) -> str:
    return f"\n<details><summary>{summary}</summary>\n\n{text}\n</details>\n"


def percent(share: float, digits: int = 2) -> str:
    return f"{round(100 * share, digits) + 0.0:+.{digits}f} %"  # + 0.0: no -0.00


def span(values: Iterable[float], form: str) -> str:
    values = sorted(values)
    return f"{values[0]:{form}} to {values[-1]:{form}}"


def cells(row: Row, *columns: Column) -> list[str]:
    """The figures of a row, empty where it has none."""
    return ["" if cell == "-" else cell for cell in pages.figures(row, columns)]


def grid(
    corner: str, rows: dict[str, Any], columns: dict[str, Any], cell: Callable[[Any, Any], str]
) -> str:
    """A table of cells by what rows and columns stand for, each by its name."""
    places = columns.values()
    return table([corner, *columns], [[n, *(cell(r, c) for c in places)] for n, r in rows.items()])


def bytes_of(whole: bool, unit: float, form: str) -> str:
    """Stored and peak bytes; whole: of models with all cases, rather than of the others."""
    rows = load("memory")["rows"]
    row_of = {(r["model"], r["precision"], r["case"]): r for r in rows}
    count = Counter((r["model"], r["precision"]) for r in rows)
    some = [column for column in count if (count[column] == max(count.values())) == whole]
    pair = [(key, unit, form) for key in ("saved_bytes", "peak_bytes")]
    return grid(
        f"stored / peak, {'GiB' if unit == GIB else 'MiB'}",
        {label(c): c for c in ordered(case for *column, case in row_of if tuple(column) in some)},
        {", ".join(column): column for column in some},
        lambda case, column: " / ".join(cells(row_of.get((*column, case), {}), *pair)).strip(" /"),
    )


def methods() -> str:
    return bytes_of(True, GIB, ".2f")


def other_models() -> str:
    return bytes_of(False, MIB, ",.0f")


def memory_answer() -> str:
    document, plans = load("memory"), load("planning_cpu")
    name = document["rows"][0]["model"]
    row_of = {(r["precision"], r["case"]): r for r in document["rows"] if r["model"] == name}

    def of(key: str) -> str:
        ours, full = ([row_of[p, case][key] / GIB for p in BOTH] for case in ("razor", "full"))
        both = zip(ours, full, BOTH, strict=True)
        return " and ".join(f"{one:.2f} GiB in {p} (`full`: {whole:.2f})" for one, whole, p in both)

    return prose(
        f"On {name}, `razor` at ratio {document['ratio']} stores {of('saved_bytes')} for backward. "
        f"The peak of a step, with weights, gradients and momentum, is {of('peak_bytes')}. Peaks "
        f"predicted by `plan` differ from measured peaks by {percent(plans['least_over'])} to "
        f"{percent(plans['most_over'])}."
    )


def compared() -> str:
    document = load("compared")
    rows = [
        [
            label(row["label"]),
            f"{row['needed_bytes'] / GIB:.2f}",
            "yes" if row["fits"] else "no",
            *cells(row, ("saved_bytes", MIB, ",.0f"), ("traced_peak_bytes", MIB, ",.0f")),
            f"{1 / row['speedup_vs_full']:.2f}",
            f"{100 * row['score']:.1f} ± {100 * row['score_std']:.1f}",
        ]
        for row in document["rows"]
    ]
    head = ("method", "needs, GiB", "fits", "stored, MiB", "peak, MiB", "step time", "accuracy, %")
    command = f"razorctl compare vit-s14 ./fashion {document['settings']}"
    take = document["take"]
    return (
        prose(f"`{command}`")
        + f"\n{table(head, rows)}\n"
        + prose(f"Take {take['label']}: {take['why']}.")
    )


def planned() -> str:
    groups: dict[tuple[str, str], list[float]] = {}
    for row in load("planning_cpu")["rows"]:
        groups.setdefault((row["model"], row["point"].split()[1]), []).append(row["over"])
    lines = [
        [model, label(case), len(over), percent(min(over)), percent(max(over))]
        for (model, case), over in groups.items()
    ]
    return table(["model", "method", "steps", "lowest difference", "highest"], lines)


FRONT = ("vit-b16", "vit-l16", "bert-base", "vit-g14", "llama-3.2-1b", "llama-3.1-8b")
FITTING = ("full", "checkpoint", "razor")
STATES = {"lean": "*", "host": "†"}  # marks of batches that need another state; see fits.py


def fits(place: str = "") -> str:
    """The largest batches of each model on each card; front: of those that README.md has."""
    document = load("fits")
    rows = [row for row in document["rows"] if not place or row["model"] in FRONT]
    row_of = {(r["model"], r["gpu"]): r for r in rows}
    ratios = {r["model"]: r["ratio"] for r in rows}
    other = {m: f", ratio {r:g}" for m, r in ratios.items() if r != document["ratio"]}

    def cell(model: str, gpu: str) -> str:
        row = row_of[model, gpu]
        states = {method: mark for state, mark in STATES.items() for method in row.get(state, ())}
        each = [f"{row[way] or NONE}{states.get(way, '')}" for way in FITTING]
        return NONE if set(each) == {NONE} else " / ".join(each)

    names = {f"`{model}`{other.get(model, '')}": model for model in ratios}
    cards = {f"`{r['gpu']}`, {r['memory_gib']:.0f} GB": r["gpu"] for r in rows}
    return grid("model", names, cards, cell)


def papers() -> str:
    """Each table of the papers with what `plan` predicts for its rows."""
    document, parts = load("papers"), []
    for one in document["tables"]:
        rows = [row for row in document["rows"] if row["table"] == one["name"]]
        times = [f"{one['time']}, paper"] * bool(one["time"])
        accurate = any(any(row["accuracies"]) for row in rows)
        data = [f"{name}, paper" for name in one["data"]] if accurate else []
        lines = []
        for row in rows:
            full = row["step_seconds"] / row["step_seconds_vs_full"]
            ends = (f"{row[f'step_seconds_{end}'] / full:.2f}" for end in ("low", "high"))
            said = [row["memory"], *[row["time"]] * len(times), *row["accuracies"][: len(data)]]
            sizes = [f"{size} MiB" for size in cells(row, *PAIR)]
            lines.append([row["method"], *said, *sizes, " to ".join(dict.fromkeys(ends))])
        parts.append(
            f"**{one['name']}**: `{one['model']}`, {one['gpu']}.\nMemory in the paper: "
            f"{one['memory']}. The first row:\n`{rows[0]['command']}`\n\n"
            + table(["row", "memory, paper", *times, *data, "stored", "peak", "step"], lines)
        )
    return "\n".join(parts)


def taken(document: Row, precision: str) -> list[Row]:
    """The rows of a precision that there was time for."""
    rows = [row for row in document["rows"] if row["precision"] == precision]
    return [row for row in rows if "in the seconds given" not in (row["error"] or "")]


def time_answer() -> str:
    cpu, card = (
        {r["case"]: cells(r, ("step_time_vs_full", 1, ".2f"))[0] for r in rows}
        for rows in (taken(d, d["precisions"][0]) for d in (load("step_cpu"), load("step_cuda")))
    )
    over = [row["over"] for row in load("published")["rows"]]
    steps = {row["case"]: row["step_seconds"] for row in load("phases_cuda")["rows"]}
    of_full = {name: f"{seconds / steps['full']:.2f}" for name, seconds in steps.items()}
    return prose(
        "All times are relative to full fine-tuning. On two CPU cores with VNNI a step of ViT-S/16 "
        f"takes {cpu['razor']} with `razor`, {cpu['razor, int8 forward']} with an int8 forward "
        f"pass too, and {cpu['checkpoint']} with checkpointing. On an H100 a step of ViT-B/16 in "
        f"bf16 takes {of_full['razor, CUDA graphs']} with `razor` and CUDA graphs; compiled full "
        f"fine-tuning takes {of_full['full, compiled']}. Without CUDA graphs `razor` takes "
        f"{of_full['razor']}, since Python launches kernels slower than the GPU runs them. "
        f"Checkpointing took {card['checkpoint']} on an H200. For other GPUs times are predicted. "
        f"Predicted rates differ from rates that timm published by {percent(min(over), 0)} to "
        f"{percent(max(over), 0)}."
    )


def kernel_groups() -> str:
    rows = load("phases_cuda")["rows"]
    full = next(row for row in rows if row["case"] == "full")["step_seconds"]
    groups = dict.fromkeys(name for row in rows for name in row["groups"])
    lines = [[name, *(f"{1e3 * r['groups'].get(name, 0):.1f}" for r in rows)] for name in groups]
    lines.append(["a step", *(f"{1e3 * row['step_seconds']:.1f}" for row in rows)])
    lines.append(["of `full`", *(f"{row['step_seconds'] / full:.2f}" for row in rows)])
    for name in ("peak", "reserved"):
        cells = (f"{row[f'{name}_bytes'] / MIB:,.0f}" for row in rows)
        lines.append([f"{name}, MiB", *cells])
    return table(["ms", *(label(row["case"]) for row in rows)], lines) + "\n" + made("phases_cuda")


def in_turns(stem: str, table_of: Callable[[list[Row]], str]) -> str:
    """A table for each device and precision that steps were timed on."""
    parts = []
    for path in sorted(RESULTS.glob(f"{stem}_*.json")):
        document = load(path.stem)
        for precision in document["precisions"]:
            if not (rows := taken(document, precision)):
                continue
            about = [document["model"], f"{document['image_size']} px", precision]
            about += [f"batch {document['batch_size']}"]
            about += [f"ratio {document['ratio']}"] if "ratio" in document else []
            how = "traced" if "CPU" in document["device"] else "measured"
            if how == "traced" and any(", compiled" in row["case"] for row in rows):
                how += "; peaks of compiled cases are measured"
            text = f"**{document['device']}**: {', '.join(about)}. Times are medians of at most "
            text += f"{document['turns']} turns. Peaks are {how}."
            parts += [prose(text), table_of(rows), made(path.stem)]
    return "\n".join(parts)


def whole_steps() -> str:
    def table_of(rows: list[Row]) -> str:
        row_of = {row["case"]: row for row in rows}
        keys = ["step_time_vs_full", "step_time_vs_full_compiled"]
        keys = [key for key in keys if any(row.get(key) for row in rows)]
        sizes = [(key, MIB, ".0f") for key in ("saved_bytes", "peak_bytes")]

        def line(row: Row) -> list[str]:
            if row["error"]:  # a case that failed its check has no time
                return [row["error"], "", *("" for _ in keys)]
            ratios = cells(row, *((key, 1, ".2f") for key in keys))
            return [*(f"{size} MiB" for size in cells(row, *sizes)), *ratios]

        head = ["method", "stored for backward", "peak of a step", "step time vs `full`"]
        head += ["vs `full`, compiled"] * (len(keys) - 1)
        return table(head, [[label(case), *line(row_of[case])] for case in ordered(row_of)])

    return in_turns("step", table_of)


def frontiers() -> str:
    def table_of(rows: list[Row]) -> str:
        row_of = {(row["case"].partition(" at ")[0], row["ratio"]): row for row in rows}
        ratios = sorted({row["ratio"] for row in rows} - {None})

        def cell(case: str, ratio: float | None) -> str:
            row = row_of.get((case, ratio), {"error": ""})
            figures = cells(row, PAIR[1], ("step_time_vs_full", 1, ".2f"))
            return row["error"] or ", ".join(filter(None, figures))

        columns = {f"ratio {ratio}": ratio for ratio in ratios} | {"no ratio": None}
        return grid("method", {label(c): c for c in ordered(c for c, _ in row_of)}, columns, cell)

    return in_turns("frontier", table_of)


def linear_layer() -> str:
    document = load("linear_cpu")
    keys = "forward_vs_full", "both_vs_full"
    row_of = {(row["method"], row["ratio"]): row for row in document["rows"]}
    names = list(dict.fromkeys(method for method, _ in row_of if method != "full"))
    gains = {  # how many times as fast storing columns is as storing elements
        r: [row_of["backrazor", r][key] / row_of["prebackrazor", r][key] for key in keys]
        for r in document["ratios"]
        if not row_of["backrazor", r]["error"] and not row_of["prebackrazor", r]["error"]
    }
    paper = {float(r): (t[0] / t[1], t[2] / t[3]) for r, t in document["published_ms"].items()}

    def cell(ratio: float, column: Any) -> str:
        if isinstance(column, dict):
            return " / ".join(f"{times:.2f}" for times in column.get(ratio, ()))
        row = row_of[column, ratio]
        why = "cannot be met" if "cannot be met" in (row["error"] or "") else row["error"]
        return why or " / ".join(cells(row, *((key, 1, ".2f") for key in keys)))

    text = (
        f"Storing columns (`prebackrazor`) is {span([g for _, g in gains.values()], '.2f')} times "
        "as fast as storing elements (`backrazor`) over both passes. In Tab. 3 of Sheared "
        f"Backpropagation it is {span([g for _, g in paper.values()], '.2f')} times as fast, on an "
        "RTX 4090 at batch 128."
    )
    columns: dict[str, Any] = {f"`{name}`": name for name in names}
    columns |= {"columns over elements": gains, "Tab. 3": paper}
    lines = grid("ratio", {str(r): r for r in document["ratios"]}, columns, cell)
    return f"{prose(text)}\n{lines}"


def published() -> str:
    rows = load("published")["rows"]
    row_of = {(r["model"], r["gpu"], r["phase"]): r for r in rows}
    phases = {"train": "training", "infer": "inference"}

    def cell(model: str, column: tuple[str, str]) -> str:
        if (row := row_of.get((model, *column))) is None:
            return ""
        return f"{row['predicted']:,.0f} of {row['rate']:,.0f} ({percent(row['over'], 1)})"

    columns = {f"{r['gpu']}, {phases[r['phase']]}": (r["gpu"], r["phase"]) for r in rows}
    return grid("model", {f"`{r['model']}`": r["model"] for r in rows}, columns, cell)


# Gradients

SUBJECTS = {"fashion": "ViT-S/14", "r8": "BERT", "squeezenet": "SqueezeNet"}
SUBJECTS |= {"mobilenet": "MobileNetV2", "decoder": "decoder"}


def way(row: Row) -> str:
    """The case of a row of gradients.json."""
    return f"{row['method']}, int8 forward" if row.get("int8_forward") else row["method"]


def whole(row: Row) -> float:
    cosine: float = row["closeness"]["all"]["cosine"]
    return cosine


def gradients_answer() -> str:
    rows = {(r["task"], r["precision"], way(r), r["ratio"]): r for r in load("gradients")["rows"]}

    def of(ratio: float, *tasks: str) -> str:
        return f"{min(whole(rows[t, p, 'razor', ratio]) for t in tasks for p in BOTH):.3f}"

    attention = ("fashion", "r8", "decoder")
    error = math.sqrt(1 - float(of(0.9, *attention)) ** 2)
    cases = ("fashion", "bf16", "razor", 0.9), ("fashion", "bf16", "full", None)
    razor, full = (f"{rows[case]['update']['cosine']:.3f}" for case in cases)
    return prose(
        "A gradient with a cosine of 1 to the exact one is exact; a cosine of "
        f"{of(0.9, *attention)} is an orthogonal error of {error:.0%} of its length. On a ViT, a "
        f"BERT and a small decoder, in bf16 and fp32, the whole gradient of `razor` has a cosine "
        f"of at least {of(0.9, *attention)} at ratio 0.9 and {of(0.97, *attention)} at 0.97. On "
        f"SqueezeNet it has {of(0.9, 'squeezenet')} and {of(0.97, 'squeezenet')}. Over 20 steps "
        f"of AdamW on the ViT in bf16, the update has a cosine of {razor} with `razor` at 0.9, "
        f"and of {full} with full fine-tuning. MobileNetV2 is the hardest model: in bf16 the "
        "gradient of full fine-tuning itself has a cosine of "
        f"{whole(rows['mobilenet', 'bf16', 'full', None]):.3f}."
    )


def cosines(precision: str) -> str:
    """The cosines at one precision, a row for each method."""
    rows = [row for row in load("gradients")["rows"] if row["precision"] == precision]
    cosine_of = {(r["task"], way(r), r["ratio"]): f"{whole(r):.3f}" for r in rows}
    ratios = sorted({r["ratio"] for r in rows if r["ratio"] is not None})

    def cell(case: str, ratio: float | None) -> str:
        figures = [cosine_of.get((task, case, ratio), "-") for task in SUBJECTS]
        return " / ".join(figures) if any(figure != "-" for figure in figures) else ""

    return grid(
        f"cosine in {precision}, {' / '.join(SUBJECTS.values())}",
        {label(case): case for case in map(way, rows)},
        {f"ratio {ratio}": ratio for ratio in ratios} | {"no ratio": None},
        cell,
    )


def updates() -> str:
    """The cosines of updates and of worst parameters."""
    lines = []
    for row in load("gradients")["rows"]:
        if "update" in row and not row["int8_forward"]:
            vectors = row["update"], row["update"]["worst"], row["worst"]
            names = f"{row['task']}, {row['precision']}", f"{way(row)} {row['ratio'] or ''}".strip()
            lines.append([*names, *(f"{vector.get('cosine', 1):.3f}" for vector in vectors)])
    heads = ["update", "worst parameter's update", "worst parameter's gradient"]
    return table(["task, precision", "case", *heads], lines)


def task_cosines() -> str:
    """The cosines of embeddings and of detection."""
    heads = ["task, precision", "case", "stored", "to the exact gradient"]
    heads += ["to `full` in the same precision", "worst parameter, to `full`"]
    lines = []
    for row in load("task_gradients")["rows"]:
        names = f"{row['task']}, {row['precision']}", f"{way(row)} {row['ratio']}"
        case = "full" if row["method"] == "full" else names[1]
        if "noise" in row:
            case += f", images off by {row['noise']:g}"
        cosines = (f"{row[key]:.4f}" for key in ("cosine", "to_stock", "worst_cosine"))
        lines.append([names[0], case, f"{row['kept']:.1%}", *cosines])
    return table(heads, lines)


def on_a_gpu() -> str:
    """The first steps on a card, by method."""
    columns = (("cosine to full, fp32", 1, ".4f"), ("cosine to full", 1, ".4f"))
    columns += (("logits_distance", 1, ".1e"),)
    lines = [[label(row["case"]), *cells(row, *columns)] for row in load("first_cuda")["rows"]]
    head = ["method", "gradient to `full`, fp32", "to `full`, bf16", "logits to `full`, bf16"]
    return table(head, lines)


def trained() -> dict[tuple[str, str, str], tuple[str, Row, Row]]:
    """Task, precision and case -> the name of a file, its document, and the row.

    Of several rows the one with the most seeds is taken, and of these the first.
    """
    found: dict[tuple[str, str, str], tuple[str, Row, Row]] = {}
    for path in sorted(RESULTS.glob("accuracy-*.json")):
        document = load(path.stem)
        settings = document["settings"]
        for row in document["rows"]:
            key = row["task"], settings["job"]["precision"], row["case"]
            if key not in found or settings["seeds"] > found[key][1]["settings"]["seeds"]:
                found[key] = path.stem, document, row
    return found


def accuracy_answer() -> str:
    """How far razor is from full, beside the spread of their seeds."""
    row_of = {key: row for key, (*_, row) in trained().items() if not row["error"]}
    pairs = [(row, row_of[t, p, "full"]) for (t, p, case), row in row_of.items() if case == "razor"]
    near = [abs(r["delta_vs_full"]) <= max(r["accuracy_std"], f["accuracy_std"]) for r, f in pairs]

    def points(case: str) -> str:
        rows = [row for (*_, one), row in row_of.items() if one == case]
        scores = [100 * r["delta_vs_full"] for r in rows if r["metric"] != "perplexity"]
        return span(scores, "+.1f")

    texts = [(r, f) for r, f in pairs if r["metric"] == "perplexity"]
    most = max(abs(r["delta_vs_full"]) / f["accuracy_mean"] for r, f in texts)
    tasks, decoders = (len({r["task"] for r, _ in some}) for some in (pairs, texts))
    return prose(
        "Differences are to full fine-tuning, in fp32 and bf16. With `razor` at ratio 0.9 they are "
        f"{points('razor')} points on {tasks - decoders} tasks. On {decoders} tasks of a decoder "
        f"the perplexity changes by at most {most:.2%}. {sum(near)} of {len(near)} differences are "
        "within the standard deviation over seeds. With `backrazor` at 0.9 differences are "
        f"{points('backrazor')} points."
    )


def accuracies() -> str:
    """A table for each task."""
    tables: dict[str, tuple[str, list[list[object]]]] = {}
    for (task, precision, case), (_, document, row) in trained().items():
        if "state" in row:
            continue
        job, metric = document["settings"]["job"], row.get("metric", "")
        about = f"**{document['summary']}**: {job['steps']} steps of AdamW, batch "
        about += f"{job['batch_size']}; {'mAP' if metric == 'map' else metric.replace('_', ' ')}."
        _, lines = tables.setdefault(task, (about, []))
        if row["error"]:
            lines.append([precision, label(case), *[""] * 3, row["error"], *[""] * 4])
            continue
        form = ".2f" if metric == "perplexity" else ".4f"
        tried = {run["rate"] for run in document["runs"] if run["case"] == case}
        rate = f"{row['learning_rate']:g}{'*' * (len(tried) > 1)}"
        stored = f"{row['saved_bytes'] / row['full_saved_bytes']:.0%}"
        score = f"{row['accuracy_mean']:{form}} ± {row['accuracy_std']:{form}}"
        step, time = (
            cells(row, (f"{k}_vs_full", 1, ".2f"))[0] for k in ("step_time", "time_to_target")
        )
        line = [precision, label(case), len(row["seeds"]), rate, stored, score]
        line += [
            f"{row['delta_vs_full']:+{form}}",
            step,
            row["steps_to_target"] or "not reached",
            time,
        ]
        lines.append(line)
    head = ["precision", "method", "seeds", "learning rate", "stored", "test score"]
    head += ["minus `full`", "step vs `full`", "steps to target", "time vs `full`"]
    return "\n".join(f"{about}\n\n{table(head, lines)}" for about, lines in tables.values())


def state_scores() -> str:
    """The score of full with AdamW in fp32 on each task, and what each state changes in it."""
    documents = {task: d for (task, *_), (_, d, row) in trained().items() if "state" in row}
    row_of = {(task, row["case"]): row for task, d in documents.items() for row in d["rows"]}

    def cell(task: str, case: str) -> str:
        row = row_of[task, case]
        form = ".2f" if row["metric"] == "perplexity" else ".4f"
        key, sign = ("delta_vs_full", "+") if "state" in row else ("accuracy_mean", "")
        return f"{row[key]:{sign}{form}} ± {row['accuracy_std']:{form}}"

    head = (f"{d['summary']}, {row_of[t, 'full']['metric']}" for t, d in documents.items())
    cases = dict.fromkeys(case for _, case in row_of)
    return table(
        ["case", *head],
        (
            [label(case), *(cell(t, case) for t in documents if (t, case) in row_of)]
            for case in cases
        ),
    )


def retrieval() -> str:
    """Embeddings at equal wall time, with the batch that a budget of memory holds."""
    document = load(RETRIEVAL)
    lines = [
        [
            row["way"],
            row["batch_size"],
            f"{row['step_seconds']:.1f} s",
            row["steps"],
            f"{row['learning_rate']:g}",
            f"{row['recall_at_1']:.3f} ± {row['recall_at_1_std']:.3f}",
            *(f"{row[name]:.3f}" for name in ("recall_at_5", "mrr")),
        ]
        for row in document["rows"]
    ]
    head = ["way", "batch", "step", "steps", "rate", "recall at 1", "at 5", "MRR"]
    return table(head, lines)


def accuracy_files() -> str:
    head = ["result", "date", "torch", "command, after `.venv/bin/python scripts/bench/`"]
    documents = {name: document for name, document, _ in trained().values()}
    lines = [
        [f"[`{name}`](results/{name}.json)", d["date"], d["versions"]["torch"], d["command"][14:]]
        for name, d in documents.items()
    ]
    return table(head, [[*line, f"`{command}`"] for *line, command in lines])


# Models

SHARES = (0.1, 0.15, 0.25, 0.5, 10)  # of the bytes of full, upper ends
WAYS = {"`sparsify`": "0.9", "`sparsify_within`": "within"}
# Type of an error -> why a model is left out.
CAUSES = {
    "SizeError": "more than 20 million parameters",
    "InputsError": "unknown inputs",
    "UnsteadyError": "not deterministic",
    "TimeoutError": "too slow",
}


def models_answer() -> str:
    every, timm, foreign = every_listed(), load("architectures"), load("foreign")
    shares = (r["saved_bytes"] / r["full_saved_bytes"] for r in every if not r["error"])
    met = sum(bool(row.get("share_within")) for row in foreign["rows"])
    clean = sum(not row["faults"] for row in foreign["rows"])
    same = sum(not any("forward pass" in fault for fault in r["faults"]) for r in timm["rows"])
    return prose(
        f"On every listed model and task `razor` at ratio 0.9 stores {span(shares, '.1%')} of what "
        f"full fine-tuning stores for backward. Of {len(timm['rows'])} models, one for each source "
        f"file of timm, {same} have a bitwise unchanged forward pass. On {met} of "
        f"{len(foreign['rows'])} small models for which `razor` was not developed, "
        f"`sparsify_within` meets the ratio in fp32; {clean} have no fault in fp32 or bf16."
    )


def every_listed() -> list[Row]:
    """The rows of all listed models and tasks."""
    return [*load("memory")["listed"]["rows"], *load("detectors")["rows"]]


def listed() -> str:
    """The share that `razor` stores on every listed model."""
    every = every_listed()
    row_of = {(r["model"], r["task"], r["precision"]): r for r in every}

    def cell(row: Row) -> str:
        full, share = row["full_saved_bytes"], (row["saved_bytes"] or 0) / row["full_saved_bytes"]
        return f"{full / MIB:,.0f} MiB; {row['error'] or f'{share:.1%}'}"

    places = dict.fromkeys((r["model"], r["task"]) for r in every)
    lines = [[f"`{m}`", task, *(cell(row_of[m, task, p]) for p in BOTH)] for m, task in places]
    return table(["model", "task", *BOTH], lines)


def architectures() -> str:
    document = load("architectures")
    rows = sorted(document["rows"], key=lambda row: row["cosine"])
    faults = [f"`{row['model']}`: {', '.join(row['faults'])}" for row in rows if row["faults"]]
    text = f"{sum(bool(row['options']) for row in rows)} of {len(rows)} are made smaller. The "
    text += f"cosine of the whole gradient is at least {rows[0]['cosine']:.5f}."
    text += f" Faults: {'; '.join(faults)}." if faults else ""
    head = ["model", "pixels", "swapped modules", "cosine", "worst parameter"]
    lines = []
    for row in rows:
        worst = cells(row.get("worst") or {}, ("cosine", 1, ".4f"))
        name, cosine = f"`{row['model']}`", f"{row['cosine']:.5f}"
        lines.append([name, row["pixels"], row["swapped"], cosine, *worst])
    return prose(text) + folded("Every model, lowest cosine first", table(head, lines))


def part(row: Row, precision: str) -> Row:
    """The part of a row for a precision, empty if the stock model has no step in it."""
    return row if precision == "fp32" else row.get("bf16") or {}


def shares(library: str, rows: list[Row]) -> Iterator[list[object]]:
    """The models of a library by the share that they store, those that are refused last."""
    for precision, (name, key) in product(BOTH, WAYS.items()):
        if own := [p for row in rows if (p := part(row, precision)).get("full")]:
            stored = [row.get(f"share_{key}") for row in own]
            ends = Counter(next(e for e in SHARES if share <= e) for share in stored if share)
            refused = sum(not share for share in stored) or ""
            yield [library, len(own), precision, name, *(ends[e] or "" for e in SHARES), refused]


def closeness(library: str, rows: list[Row]) -> Iterator[list[object]]:
    """The cosines of a library by precision and way, and of the gradient of full in bf16."""
    for precision, (name, key) in product(BOTH, [*WAYS.items(), ("`full` to fp32", "full")]):
        every = [part(row, precision).get(f"cosine_{key}") for row in rows]
        if known := sorted(cosine for cosine in every if cosine is not None):
            low = f"{known[0]:.4f}", sum(cosine < 0.98 for cosine in known)
            yield [library, precision, name, f"{median(known):.5f}", *low]


def foreign() -> str:
    document = load("foreign")
    rows, out = document["rows"], document["left_out"]
    other = "not built by the usual configuration"
    causes = Counter(CAUSES.get(e.partition(":")[0], other) for e in out.values())
    text = (
        f"{len(rows) + len(out)} of {sum(document['listed'].values())} models were tried. "
        f"{len(out)} are left out: "
        f"{', '.join(f'{n} x {cause}' for cause, n in causes.most_common())}."
    )
    if early := sum("bf16" not in row for row in rows):
        text += f" {early} rows are of earlier code, without bf16."
    of = {library: [r for r in rows if r["library"] == library] for library in document["listed"]}
    ends = ("to 10 %", *(f"to {end:.0%}" for end in SHARES[1:-1]), "more", "refused")
    bad = []
    for row in rows:
        refusals = dict.fromkeys(part(row, precision).get("refusal") for precision in BOTH)
        if why := "; ".join([*row["faults"], *filter(None, refusals)]).replace("|", "\\|"):
            kept = [part(row, p).get(f"share_{way}") for p in BOTH for way in WAYS.values()]
            stored = (f"{share:.1%}" if share else "-" for share in kept)
            bad.append([f"{row['library']} `{row['model']}`", *stored, why])
    cosine = ["library", "precision", "cosine of", "median", "lowest", "below 0.98"]
    share = ["library", "models", "precision", "by", *ends]
    tables = [
        table(head, [line for one in of.items() for line in lines(*one)])
        for head, lines in ((share, shares), (cosine, closeness))
    ]
    every = table(["model", *(f"{way}, {p}" for p in BOTH for way in WAYS), "why"], bad)
    about = "Models with faults or refusals, or with more than a tenth stored"
    return "\n".join([prose(text), *tables]) + folded(about, every)


def failed_calls() -> str:
    """The table of commands of which each system call on a file has failed."""
    lines = [
        [name, row["calls"], f"{row['faults']:,}", len(row["wrong"])]
        for name, row in load("faults")["commands"].items()
    ]
    return table(["command", "system calls", "faults", "wrong"], lines)
