"""Writes every table from results/*.json: scripts/bench/README.md, and those in README.md.

    .venv/bin/python scripts/bench/report.py [--check]

`--check` writes nothing and exits with 1 if a page differs from what the results say.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator

from breadth import architectures, foreign
from pages import GIB, HERE, MIB, RESULTS, ROOT, Row, label, load, ordered, ranged, source, table
from quality import accuracies, branches, gradients, paper_figures, papers, way
from times import frontiers, linear_layers, packed, whole_steps

PAGE, FRONT = HERE / "README.md", ROOT / "README.md"
NONE = "\N{EN DASH}"


def memory() -> str:
    document = load("memory")
    row_of = {(r["model"], r["precision"], r["case"]): r for r in document["rows"]}
    every: dict[tuple[str, str], list[str]] = {}
    for r in document["rows"]:
        every.setdefault((r["model"], r["precision"]), []).append(r["case"])
    most = max(map(len, every.values()))
    whole = [column for column, cases in every.items() if len(cases) == most]
    few = [column for column in every if column not in whole]

    def cells(columns: list[tuple[str, str]], unit: float, form: str) -> str:
        name = "GiB" if unit == GIB else "MiB"

        def cell(row: Row | None) -> str:
            keys = ("saved_bytes", "peak_bytes")
            return " / ".join(format(row[key] / unit, form) for key in keys) if row else ""

        cases = ordered(case for column in columns for case in every[column])
        return table(
            [f"kept / peak, {name}", *(f"{model}, {precision}" for model, precision in columns)],
            [[label(c), *(cell(row_of.get((*column, c))) for column in columns)] for c in cases],
        )

    return (
        "The bytes that a step with SGD and momentum keeps between its forward and backward pass, "
        f"and its peak, at ratio {document['ratio']}.\nA peak here counts tensors only; `plan` "
        "also counts what kernels allocate inside.\n\n"
        + source("memory", document)
        + cells(whole, GIB, ".2f")
        + "\nOther models. For ProxylessNAS-Mobile at 224 px, batch 8, Tables 2 and 4 of Back "
        "Razor say that `full` keeps 366 MB and\nBack Razor 42 MB. The step of the decoder is the "
        "one that `plan` traces, which includes the loss.\n\n" + cells(few, MIB, ",.0f")
    )


def listed() -> str:
    """The share that `razor` keeps on every listed model."""
    document = load("memory")
    every = document["listed"]
    row_of = {(r["model"], r["task"], r["precision"]): r for r in every["rows"]}
    places = list(dict.fromkeys((r["model"], r["task"]) for r in every["rows"]))

    def cell(row: Row) -> str:
        full = f"{row['full_saved_bytes'] / MIB:,.0f} MiB"
        if row["error"]:
            return f"{full}; {row['error']}"
        return f"{full}; {row['saved_bytes'] / row['full_saved_bytes']:.1%}"

    return (
        "The bytes that a step of `full` keeps on every listed model, and the share of them that "
        f"`razor` keeps at ratio {document['ratio']}.\nWhere `finetune` refuses that ratio, its "
        f"reason is in the table. Batches have {every['batch_size']} images of the model's own "
        f"size, or texts of {every['tokens']}\ntokens.\n\n"
        + table(
            ["model", "task", "fp32", "bf16"],
            [
                [f"`{model}`", task, *(cell(row_of[model, task, p]) for p in ("fp32", "bf16"))]
                for model, task in places
            ],
        )
    )


def percent(share: float, digits: int = 2) -> str:
    return f"{round(100 * share, digits) + 0.0:+.{digits}f} %"  # + 0.0: no -0.00


def planned() -> Iterator[str]:
    for path in sorted(RESULTS.glob("planning_*.json")):
        document = load(path.stem)
        on_cpu = path.stem.endswith("cpu")
        groups: dict[tuple[str, str], list[float]] = {}
        for row in document["rows"]:
            case = row["point"].split()[1]
            groups.setdefault((row["model"], case), []).append(row["over"])
        yield (
            f"By how much predicted peaks exceed measured ones, in {len(document['rows'])} "
            f"training steps: {percent(document['least_over'])} to\n"
            f"{percent(document['most_over'])}, and {percent(document['mean_over'])} in the mean."
            f"{ON_A_CPU if on_cpu else ''}\n\n"
            + source(path.stem, document)
            + table(
                ["model", "method", "steps", "least over measured", "most"],
                [
                    [model, label(case), len(over), percent(min(over)), percent(max(over))]
                    for (model, case), over in groups.items()
                ],
            )
        )


def published() -> str:
    document = load("published")
    document["device"] = f"none: predicted; measured rates: {document['source']}"
    row_of = {
        (r["gpu"], r["phase"], r["model"]): f"{r['predicted']:,.0f} of {r['rate']:,.0f} "
        f"({percent(r['over'], 1)})"
        for r in document["rows"]
    }
    columns = list(dict.fromkeys((r["gpu"], r["phase"]) for r in document["rows"]))
    phases = {"train": "training", "infer": "inference"}
    return (
        "Images per second: the predicted rate, of the rate that timm published, and the "
        "difference in parentheses.\n\n"
        + source("published", document)
        + table(
            ["model", *(f"{gpu}, {phases[phase]}" for gpu, phase in columns)],
            [
                [f"`{model}`", *(row_of.get((*column, model), "") for column in columns)]
                for model in dict.fromkeys(r["model"] for r in document["rows"])
            ],
        )
    )


def choices() -> str:
    document = load("choices")
    rows = document["rows"]
    row_of = {(r["model"], r["gpu"], r["memory_gib"], r["prefer"]): r for r in rows}
    prefers = list(dict.fromkeys(r["prefer"] for r in rows))
    approximate = sum(row["exact"] is False for row in rows)
    faults = [fault for row in rows for fault in row["faults"]]

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if row["label"] is None:
            return "nothing fits"
        return f"{row['label']}, {ranged(row, '.2f')} s"

    verdict = "all fit, no listed way dominates one, and more memory makes none\nslower"
    return (
        "What `plan` chooses, and the predicted time of a step, which is a range where no card "
        f"has run the kernels.\nOf {len(rows)} choices "
        + (f"{len(faults)} are faulty" if faults else verdict)
        + f". {approximate} of them are ways whose gradient is approximate.\n\n"
        + source("choices", document)
        + "<details><summary>Every choice</summary>\n\n"
        + table(
            ["model", "card", "GiB", *(f"`{prefer}`" for prefer in prefers)],
            [
                [*place, *(cell(row_of.get((*place, prefer))) for prefer in prefers)]
                for place in dict.fromkeys((r["model"], r["gpu"], r["memory_gib"]) for r in rows)
            ],
        )
        + "\n</details>\n"
    )


def fits() -> str:
    """The largest batches of `full` and of `razor` of each model on each card."""
    document = load("fits")
    rows = document["rows"]
    row_of = {(r["model"], r["gpu"]): r for r in rows}
    cards = {r["gpu"]: f"`{r['gpu']}`, {r['memory_gib']:.0f} GB" for r in rows}
    other = {r["model"]: r["ratio"] for r in rows if r["ratio"] != document["ratio"]}

    def name(model: str) -> str:
        return f"`{model}`, ratio {other[model]:g}" if model in other else f"`{model}`"

    def cell(row: Row) -> str:
        if row["full"] is row["razor"] is None:
            return NONE
        each = (f"{row[m] or NONE}{'*' * (m in row['lean'])}" for m in ("full", "razor"))
        return " → ".join(each)

    return table(
        ["model", *cards.values()],
        [
            [name(model), *(cell(row_of[model, gpu]) for gpu in cards)]
            for model in dict.fromkeys(r["model"] for r in rows)
        ],
    )


def which_fits() -> str:
    document = load("fits")
    jobs: dict[str, list[str]] = {}
    for row in document["rows"]:
        job = f"{row['data']}, `--input-size {row['input_size']}`, {row['optimizer']}"
        models = jobs.setdefault(job, [])
        models += [] if row["model"] in models else [row["model"]]
    return (
        "The largest batch that is predicted to fit in all of a card's memory, of `full` → of "
        f"`razor` at ratio {document['ratio']}, in bf16, in one pass.\nIt is the power of two that "
        f"`--batch-size auto` takes, up to {document['most']:,}. `{NONE}` means that nothing fits, "
        f"`*` that it fits only with\n`{document['lean']}`. No card has run these steps. The jobs "
        "are\n"
        + ";\n".join(f"{job}: {', '.join(models)}" for job, models in jobs.items())
        + ".\n\n"
        + source("fits", document)
        + fits()
    )


def killed() -> str:
    """The table of runs that were killed at random instants."""
    document = load("crash")
    return (
        f"Runs of `{document['job']['model']}` on {document['job']['dataset']} take "
        f"{document['steps']} steps and write a checkpoint every {document['job']['save_every']} "
        "steps. They got SIGKILL at random instants,\nand were resumed with `--resume`. Their "
        "final weights equal those of a run that was never killed, to the bit.\n\n"
        + source("crash", document)
        + table(
            ["method", "kills", "in preparation", "in a save", "between saves", "same weights"],
            [
                [
                    name,
                    row["kills"],
                    row["kills_in_preparation"],
                    row["kills_in_a_save"],
                    row["kills_between_saves"],
                    "yes" if row["bit_identical"] else "NO",
                ]
                for name, row in document["cases"].items()
            ],
        )
    )


def failed_calls() -> str:
    """The table of commands of which each system call on a file has failed."""
    document = load("faults")
    return (
        "Each system call on a file below the working directory has failed once with each error "
        "that it may have, or the command\nwas killed there. Afterwards nothing of the user was "
        "lost, the output was whole or absent, the exit code was one of the\nlisted codes, and a "
        "resumed run ended with the same weights.\n\n"
        + source("faults", document)
        + table(
            ["command", "system calls", "faults", "wrong"],
            [
                [name, row["calls"], f"{row['faults']:,}", len(row["wrong"])]
                for name, row in document["commands"].items()
            ],
        )
    )


def run_costs() -> str:
    """The tables of the time that checkpoints and loading take of a run on a CPU."""
    document = load("run_costs")
    saves = [
        [
            f"`{row['model']}`",
            label(row["case"]),
            f"{row['save_seconds']:.2f} s",
            f"{1000 * row['copy_seconds']:.1f} ms",
            f"{row['step_seconds']:.2f} s",
            f"{row['interval']:,}",
            f"{row['share_of_steps']:.1%} / {row['share_of_all']:.1%}",
            f"every {row['steps_per_save_at_5_percent']:.0f} steps",
        ]
        for row in document["saving"]
    ]
    loads = [
        [
            f"`{row['model']}`, batch {row['batch_size']}",
            row["data"],
            f"{row['step_seconds']:.2f} s",
            f"{row['step_seconds_in_memory']:.2f} s",
            f"{1000 * row['loading_seconds']:.0f} ms",
            f"{percent(row['loading_share'], 1)}",
            f"{percent(row['ratio'] - 1, 1)} ({percent(row['least_ratio'] - 1, 1)} to "
            f"{percent(row['most_ratio'] - 1, 1)})",
        ]
        for row in document["loading"]
    ]
    return (
        "The time of a checkpoint, and of the copy of random states and buffers that each step "
        "makes. The share is that of both in the\ntime of training steps / in that of the whole "
        "run, with checkpoints at the default interval. The interval of the ViT-S/16\nis that of "
        "`vit-b16`.\n\n"
        + source("run_costs", document)
        + table(
            ["model", "method", "save", "copy", "step", "interval", "share", "saves take 5 %"],
            saves,
        )
        + "\nRuns that load their rows from files take turns with runs that have the same rows in "
        "memory. Times are means over a run; the\nlast column is the median of all turns (least "
        "to most). The wait for the rows is what loading adds to a step. Photos are\nJPEGs of "
        "500 x 375 pixels, which are cropped and flipped at random.\n\n"
        + table(
            ["model", "data", "step", "in memory", "wait", "wait adds", "runs differ by"], loads
        )
    )


INTRO = """# Measurements

`report.py` writes this page from the files in [`results/`](results). Each file names the script
that made it. The words are those of the [README](../../README.md): *kept* are the bytes that
autograd holds between forward and backward pass, *peak* is the most that a training step has
allocated, *ratio* is the share that is pruned; for `razor` it is a byte budget.
"""
ON_A_CPU = """ The differences
come from kernels of PyTorch. In half of the steps of the larger models, the peak is that of the
optimizer, whatever the method."""
CUDA = """
On a CUDA machine `scripts/bench/gpu.sh OUT` takes a training step by every method beside full, runs
the tests of layers and kernels, and times whole steps of ViT-B/16 by every method, one linear
layer, steps at every ratio, and kernels, beside the times that their bytes and operations imply
(`roofline.py`). `scripts/bench/planning.py` compares predictions with what steps take. Not yet
measured on a GPU are one linear layer, kernels one by one, compiled steps, steps in fp32, any card
but an H200, and whether plans hold in all of their grid.
"""


def on_a_gpu() -> str:
    """The first steps on a card, by method."""
    document = load("first_cuda")
    cosines = ("cosine to full, fp32", "cosine to full")

    def cells(row: Row) -> list[str]:
        some = ["" if row.get(name) is None else f"{row[name]:.4f}" for name in cosines]
        far = row.get("logits_distance")
        return [label(row["case"]), *some, "" if far is None else f"{far:.1e}"]

    head = ["method", "gradient to `full`, fp32", "to `full`, bf16", "logits to `full`, bf16"]
    return (
        "A training step of ViT-B/16 with random weights on 32 images in bf16, at ratio 0.9 but "
        "where another is named:\ncosines of the whole gradient, and the relative distance of "
        "logits. Fused kernels round norms in another order than PyTorch.\n\n"
        + source("first_cuda", document)
        + table(head, [cells(row) for row in document["rows"]])
        + CUDA
    )


def page() -> str:
    """scripts/bench/README.md."""
    sections: dict[str, Iterable[str]] = {
        "Memory": [memory(), listed()],
        "Whole steps": whole_steps(),
        "Packed conversations": [packed()],
        "Every ratio": frontiers(),
        "One linear layer": linear_layers(),
        "Gradients": [gradients()],
        "On a GPU": [on_a_gpu()],
        "Accuracy": accuracies(),
        "Residual branches": branches(),
        "Peaks: predicted and measured": planned(),
        "Rates: predicted and published": [published()],
        "The papers' tables": papers(),
        "The papers' figures": paper_figures(),
        "Architectures": [architectures()],
        "Models that nobody fitted razor to": [foreign()],
        "Killed runs": [killed()],
        "Failed system calls": [failed_calls()],
        "Checkpoints and loading": [run_costs()],
        "What plan chooses": [choices()],
        "Which model fits which card": [which_fits()],
    }
    bodies = {title: "\n".join(body) for title, body in sections.items()}
    return "\n".join([INTRO, *(f"## {title}\n\n{body}" for title, body in bodies.items() if body)])


def case_of(row: Row, ratio: float) -> str:
    """The case of a row of gradients.json, which names its ratio if it is another one."""
    return way(row) if row["ratio"] in (ratio, None) else f"{way(row)}, ratio {row['ratio']:g}"


def front() -> str:
    """The table of README.md: what exact methods take, and what razor does."""
    memory, steps, cosines = load("memory"), load("frontier_cpu"), load("gradients")
    model = memory["rows"][0]["model"]
    row_of = {
        (r["precision"], r["case"]): r["peak_bytes"] / GIB
        for r in memory["rows"]
        if r["model"] == model
    }
    named = {"backrazor at 0.9": "backrazor", "razor at 0.9": "razor"}
    # Micro-batches of a quarter were timed, those of an eighth are traced.
    named |= {"accumulate 2": "accumulate 8", "razor at 0.97": "razor, ratio 0.97"}
    times = {named.get(r["case"], r["case"]): r["step_time_vs_full"] for r in steps["rows"]}
    close = {
        (r["precision"], case_of(r, memory["ratio"])): r["closeness"]["all"]["cosine"]
        for r in cosines["rows"]
        if r["task"] == "fashion"
    }
    pruned = ("backrazor", "razor", "razor, ratio 0.97")
    cases = ("full", "accumulate 8", "checkpoint", "lora", *pruned)

    def cells(precision: str, case: str) -> Iterator[str]:
        yield f"{row_of[precision, case]:.2f} GiB"
        if case in pruned:
            yield f"{close[precision, case]:.3f}"
        else:
            yield "of adapters" if case == "lora" else "exact"

    return table(
        [
            *("ratio 0.9", "peak, bf16", "gradient, bf16", "peak, fp32", "gradient, fp32"),
            "step, fp32, on a CPU",
        ],
        [
            [
                *(label(case), *cells("bf16", case), *cells("fp32", case)),
                f"{times[case]:.2f}" if case in times else "not timed",
            ]
            for case in cases
        ],
    )


def with_tables(text: str) -> str:
    """README.md with each table between its two marks, if it has them."""
    for name, text_of in (("figures", front), ("fits", fits)):
        begin, end = f"<!-- {name}: scripts/bench/report.py -->\n", f"<!-- /{name} -->\n"
        before, mark, rest = text.partition(begin)
        if mark:
            text = before + begin + text_of() + end + rest.partition(end)[2]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    wanted = {PAGE: page(), FRONT: with_tables(FRONT.read_text())}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(wanted[path])
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what the results say; run scripts/bench/report.py.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
