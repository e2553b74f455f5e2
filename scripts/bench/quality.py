"""The tables of gradients, of accuracy and of the papers, for report.py."""

from collections.abc import Iterator
from statistics import fmean

from curves import lines, picture
from pages import MIB, RESULTS, Cells, Row, label, load, ranged, source, table

from razorctl.methods import CLOSE

GRADIENTS = {
    "fashion": "ViT-S/14",
    "r8": "BERT",
    "squeezenet": "SqueezeNet",
    "mobilenet": "MobileNetV2",
    "decoder": "decoder",
}
PICTURE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="../assets/bytes-error-dark.svg">
  <img alt="Kept bytes against the error of the gradient" src="../assets/bytes-error-light.svg">
</picture>
"""
# Precision -> what the tables call it; a GPU trains in the first.
PRECISIONS = {"bf16": "cosine in bf16", "fp32": "cosine in fp32"}


def way(row: Row) -> str:
    """The case of a row of gradients.json."""
    method: str = row["method"]
    return f"{method}, int8 forward" if row.get("int8_forward") else method


def gradients() -> str:
    document = load("gradients")
    return (
        "The cosine of a method's whole gradient to the exact one, which is that of `full` in "
        f"fp32. Both are summed over {document['batches']} batches of\n"
        f"{document['batch_size']} rows. There are five models:\n\n"
        "- pretrained: ViT-S/14 and SqueezeNet 1.1 on Fashion-MNIST, a six-layer BERT on the R8 "
        "split of Reuters;\n"
        "- trained by the bench itself: MobileNetV2 of half width on half of Fashion-MNIST, a "
        "decoder of four layers on half of R8.\n  Their gradients are of the other halves.\n\n"
        "A ratio is a share of what `full` keeps at the same precision, so in bf16 it leaves "
        "`razor` half as many bits as in fp32. Where\nthere is no cosine, the ratio cannot be met "
        "or was not measured. The file also has each layer kind, the relative errors and\nthe "
        "kept bytes.\n\n"
        "`razor` chooses bits and what it makes again by errors that `allocate.py` measured, here "
        "of the worst of the ViT, the BERT and\nthe decoder, over two batches:\n\n"
        + PICTURE
        + "\n"
        + "In bf16 `full` itself rounds; on MobileNetV2 its gradient has little to do with the "
        "exact one. So `plan` divides a method's\ncosine by that of `full` at the same precision, "
        f"and calls a gradient close if this is {CLOSE} or more on\nall models with attention, or "
        "on both convolutional ones.\n\n"
        + source("gradients", document)
        + "\n".join(
            of_precision([row for row in document["rows"] if row["precision"] == precision], what)
            for precision, what in PRECISIONS.items()
        )
        + updates(document["rows"])
        + "\nListed models with **random weights**, on random images, "
        f"{document['random_batches']} batches of {document['random_batch_size']}. Fine-tuning has "
        "no such gradients: batch norms of\nrandom weights enlarge any error.\n\n"
        + random_gradients(document["random_rows"])
    )


def of_precision(rows: list[Row], what: str) -> str:
    """The cosines at one precision, a row for each method."""
    cosine_of = {(r["task"], way(r), r["ratio"]): r["closeness"]["all"]["cosine"] for r in rows}
    ratios = sorted({r["ratio"] for r in rows if r["ratio"] is not None})

    def cell(case: str, ratio: float | None) -> str:
        cosines = [cosine_of.get((task, case, ratio)) for task in GRADIENTS]
        figures = ("-" if cosine is None else f"{cosine:.3f}" for cosine in cosines)
        return " / ".join(figures) if any(cosines) else ""

    return table(
        [
            f"{what}, {' / '.join(GRADIENTS.values())}",
            *(f"ratio {ratio}" for ratio in ratios),
            "no ratio",
        ],
        [
            [label(case), *(cell(case, ratio) for ratio in (*ratios, None))]
            for case in dict.fromkeys(map(way, rows))
        ],
    )


def updates(rows: list[Row]) -> str:
    """The cosines of updates and of worst parameters; empty where results have none yet."""
    rows = [row for row in rows if "update" in row and not row["int8_forward"]]
    if not rows:
        return ""

    def case(row: Row) -> str:
        return f"{way(row)} {row['ratio'] or ''}".strip()

    def cell(row: Row) -> list[str]:
        vectors = row["update"], row["update"]["worst"], row["worst"]
        return [f"{vector.get('cosine', 1):.3f}" for vector in vectors]

    return (
        "\nAdamW gives every weight a step of one size, so its update of 20 steps sees small rows "
        "that the whole gradient hides. Cosines to the update of\n`full` in fp32, of all "
        "parameters and of the worst, q, k and v of a fused projection apart, and of the worst "
        "parameter's gradient:\n\n"
        + table(
            ["task, precision", "case", "update", "its worst", "worst gradient"],
            [[f"{row['task']}, {row['precision']}", case(row), *cell(row)] for row in rows],
        )
    )


def random_gradients(rows: list[Row]) -> str:
    """The cosines of models with random weights, where there is a row."""
    rows = [row for row in rows if not row["int8_forward"]]
    key = ("task", "precision", "method", "ratio")
    cosine_of = {tuple(r[name] for name in key): r["closeness"]["all"]["cosine"] for r in rows}
    ways = list(dict.fromkeys((r["method"], r["ratio"]) for r in rows))

    def cell(*key: object) -> str:
        return f"{cosine_of[key]:.3f}" if key in cosine_of else "-"

    return table(
        [
            "model, precision",
            *(f"{label(case)}{f' {ratio}' if ratio else ''}" for case, ratio in ways),
        ],
        [
            [f"`{task}`, {precision}", *(cell(task, precision, *one) for one in ways)]
            for precision in PRECISIONS
            for task in dict.fromkeys(r["task"] for r in rows if r["precision"] == precision)
        ],
    )


def accuracies() -> Iterator[str]:
    """A table for each task that accuracy.sh has finished, with the search for learning rates."""
    for path in sorted(RESULTS.glob("accuracy-*.json")):
        document = load(path.stem)
        rows, settings = document["rows"], document["settings"]
        if not rows:
            continue
        metric = rows[0]["metric"]
        form = ".2f" if metric == "perplexity" else ".4f"
        full = next(row for row in rows if row["case"] == "full")

        def line(row: Row, form: str = form) -> list[object]:
            if row["error"]:
                return [label(row["case"]), "", "", row["error"], "", "", "", ""]
            step, time = row["step_time_vs_full"], row["time_to_target_vs_full"]
            return [
                label(row["case"]),
                f"{row['learning_rate']:g}",
                f"{row['saved_bytes'] / row['full_saved_bytes']:.0%}",
                f"{row['accuracy_mean']:{form}} ± {row['accuracy_std']:{form}}",
                f"{row['delta_vs_full']:+{form}}",
                "not timed" if step is None else f"{step:.2f}",
                "not reached" if row["steps_to_target"] is None else row["steps_to_target"],
                "" if time is None else f"{time:.2f}",
            ]

        precision, rates = settings["job"]["precision"], settings["rates"]
        searched = len({(run["case"], run["rate"]) for run in document["runs"]}) > len(rows)
        search = (
            f"Of the learning rates\n{', '.join(f'{rate:g}' for rate in rates)}, each method has "
            "the one with the least mean loss on the validation split; seed 0 runs with each of "
            "them, other\nseeds with the best so far."
            if searched
            else f"Each method has\nthe learning rate {rates[0]:g}."
            if len(rates) == 1
            else "Each method has\nthe learning rate that the search in fp32 found for it; none "
            "was searched for in these runs."
        )
        taken = "".join(
            f" Seeds 1 and 2 of {label(case)} are those of\n`{file}`, as seed 0 has the same bits."
            for case, file in document.get("taken", {}).items()
        )
        yield (
            f"**{document['summary']}, {precision}**: {full['steps']} steps of AdamW, batch "
            f"{settings['job']['batch_size']}, {settings['seeds']} seeds. {search}\n"
            f"The target is {settings['target']:.0%} of the best mean of `full` on the "
            f"validation split.{taken}\n\n"
            + source(path.stem, document)
            + table(
                [
                    *("method", "learning rate", "kept", f"test {metric.replace('_', ' ')}"),
                    *("minus full's", "step vs `full`", "steps to target", "time vs `full`"),
                ],
                map(line, rows),
            )
            + f"\n![Losses and evaluations](../assets/{picture(path.stem).name})\n"
        )


def branches() -> Iterator[str]:
    """The table of runs that drew residual branches in different ways."""
    if not (RESULTS / "branches_cpu.json").exists():
        return
    document = load("branches_cpu")
    runs_of: dict[tuple[str, str], list[Row]] = {}
    for row in document["rows"]:
        runs_of.setdefault((row["way"], row["task"]), []).append(row)
    metrics = {row["task"]: row["metric"] for row in document["rows"]}
    ways = dict.fromkeys(["full", "razor", *(row["way"] for row in document["rows"])])

    def cells(way: str, task: str) -> Cells:
        runs = runs_of.get((way, task))
        if runs is None:
            return "", ""
        form = ".2f" if runs[0]["metric"] == "perplexity" else ".4f"
        seeds = f" ({len(runs)})" if len(runs) > 1 else ""
        score, loss = (fmean(run[key] for run in runs) for key in ("score", "loss"))
        return f"{score:{form}}{seeds}", f"{loss:.4f}"

    head = (name for task, metric in metrics.items() for name in (f"{task}, {metric}", "loss"))
    yield (
        f"`razor` where only {document['budget']:g} of the residual branches get a gradient, in "
        "the mean over branches and steps. Steps draw them in\ndifferent ways: by a bandit that "
        "learns |f(x)| |dy| of each branch (the default), with equal probabilities, by depth, in "
        "a\nnumber that changes over the run, or for each row of a batch by itself; in some, "
        "what is drawn is scaled by 1 / p. Figures are\nof the test split, at the learning rate "
        "of `full`; those of several seeds are means, with the number of seeds.\n\n"
        + source("branches_cpu", document)
        + table(
            ["branches", *head],
            [
                [
                    "`full`" if way == "full" else "all" if way == "razor" else way,
                    *(cell for task in metrics for cell in cells(way, task)),
                ]
                for way in ways
            ],
        )
    )


def papers() -> Iterator[str]:
    """Each table of the papers with what we predict for its rows."""
    document = load("papers")
    document["device"] = "none: predicted"
    yield (
        "What the papers say, beside what `plan` predicts for the same settings in fp32 in this\n"
        "implementation: the bytes kept for backward, the peak, and the time of a step, in steps "
        "of `full` with fused attention on\nthe same card. The time is a range where no card has "
        "run the kernels. Accuracies are the papers' alone, as they need their\ndata and days of a "
        "GPU; [ours](#accuracy) are of other data. The file has the command of each row.\n\n"
        + source("papers", document)
    )
    for one in document["tables"]:
        rows = [row for row in document["rows"] if row["table"] == one["name"]]
        times = [f"{one['time']}, paper"] * bool(one["time"])
        accurate = any(any(row["accuracies"]) for row in rows)
        data = [f"{name}, paper" for name in one["data"]] if accurate else []

        def line(row: Row, one: Row = one, data: list[str] = data) -> list[object]:
            cells = [row["method"], row["memory"], *[row["time"]] * bool(one["time"])]
            cells += row["accuracies"][: len(data)]
            if row["error"]:
                return [*cells, row["error"], "", ""]
            sizes = (f"{row[key] / MIB:,.0f} MiB" for key in ("saved_bytes", "peak_bytes"))
            full = row["step_seconds"] / row["step_seconds_vs_full"]
            return [*cells, *sizes, ranged(row, ".2f", full)]

        yield (
            f"**{one['name']}**: `{one['model']}`, {one['gpu']}. Memory in the paper: "
            f"{one['memory']}. The command of the first row: `{rows[0]['command']}`.\n\n"
            + table(
                ["row", "memory, paper", *times, *data, "kept", "peak", "step"], map(line, rows)
            )
        )


# Of the figures of Sheared Backpropagation that show measurements: what is there, on which data
# ours are, and of which two cases.
FIGURES = {
    "Fig. 3a, training loss by time, CIFAR-100": (
        "PreBR++ with JS: like Back Razor, a little less early on",
        *("fashion", "backrazor", "prebackrazor++, joint budget 0.5"),
    ),
    "Fig. 3b, validation accuracy by steps, CIFAR-100": (
        "PreBR++ with JS: 0.33 and 0.05 points more than Back Razor",
        *("fashion", "backrazor", "prebackrazor++, joint budget 0.5"),
    ),
    "Fig. 4, training loss of BERT, RTE": (
        "PreBR: falls a little sooner and lower than with Back Razor",
        *("r8", "backrazor", "prebackrazor++"),
    ),
}


def paper_figures() -> Iterator[str]:
    """The measured figures of Sheared Backpropagation, beside ours."""
    rows = [
        [
            "Fig. 1, time of a linear layer by ratio",
            "PreBR, which keeps columns: less than Back Razor",
            "in [the table of one linear layer](#one-linear-layer)",
            "`scripts/bench/linear.py --device cuda`",
        ]
    ]
    for figure, (paper, task, *pair) in FIGURES.items():
        for path in sorted(RESULTS.glob(f"accuracy-{task}-cpu-*.json"), reverse=True):
            document = load(path.stem)  # the newest one that has both
            line_of = {line["case"]: line for line in lines(document)}
            if line_of.keys() >= set(pair):
                break
        if not line_of.keys() >= set(pair):
            ours = "not run"
        elif "accuracy" in figure:
            ours = versus(pair, [line_of[case]["curve"][-1][1] for case in pair], ".4f")
        else:
            half = len(line_of["full"]["losses"]) // 2
            ours = "; ".join(
                f"{name} half of the steps: {versus(pair, losses, '.3f')}"
                for name, part in (("first", slice(half)), ("second", slice(half, None)))
                for losses in [[fmean(line_of[case]["losses"][part]) for case in pair]]
            )
        model, dataset = ("vit-b16", "cifar100") if task == "fashion" else ("bert-base", "rte")
        command = f"`razorctl compare {model} {dataset} --methods backrazor,prebackrazor++`"
        rows.append([figure, paper, f"{document['summary']}: {ours}", command])
    yield (
        "The figures of Sheared Backpropagation that show measurements, all on an RTX 4090, "
        "beside\n[ours on a CPU](#accuracy). All are at ratio 0.9. Fig. 2 is a drawing. The "
        "commands need a machine that reaches the hub.\n\n"
        + table(["figure", "paper", "ours", "command"], rows)
    )


def versus(cases: list[str], values: list[float], form: str) -> str:
    """The value of each of these cases."""
    pairs = zip(cases, values, strict=True)
    return ", ".join(f"{label(case)} {value:{form}}" for case, value in pairs)
