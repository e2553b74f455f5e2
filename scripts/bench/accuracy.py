"""The tables of gradients and of fine-tuning, for report.py."""

from statistics import fmean

from pages import Cells, Row, label, load, ordered, source, table

TASKS = {"fashion": "ViT-S/14, Fashion-MNIST", "r8": "BERT, R8"}
GRADIENTS = {
    "fashion": "ViT-S/14",
    "r8": "BERT",
    "squeezenet": "SqueezeNet",
    "mobilenet": "MobileNetV2",
    "decoder": "decoder",
}


def way(row: Row) -> str:
    """The case of a row of gradients.json."""
    method: str = row["method"]
    return f"{method}, int8 forward" if row.get("int8_forward") else method


def gradients() -> str:
    document = load("gradients")
    rows = document["rows"]
    found = {(r["task"], way(r), r["ratio"]): r["closeness"]["all"]["cosine"] for r in rows}
    ratios = sorted({r["ratio"] for r in rows if r["ratio"] is not None})
    columns = [*ratios, None]

    def cell(case: str, ratio: float | None) -> str:
        cosines = [found.get((task, case, ratio)) for task in GRADIENTS]
        if None not in cosines:
            return " / ".join(f"{cosine:.3f}" for cosine in cosines)
        has_ratio = (next(iter(GRADIENTS)), case, None) not in found
        return "cannot be met" if has_ratio and ratio is not None else ""

    head = [
        f"cosine, {' / '.join(GRADIENTS.values())}",
        *(f"ratio {ratio}" for ratio in ratios),
        "no ratio",
    ]
    return (
        "The cosine of the whole gradient to the exact one, both summed over "
        f"{document['batches']} batches of {document['batch_size']}: on a\npretrained ViT-S/14 and "
        "SqueezeNet 1.1 with Fashion-MNIST, on a six-layer BERT with the R8 split of Reuters, and\n"
        "on two models that the bench itself trained before: a MobileNetV2 of half width on half "
        "of Fashion-MNIST, and a\ndecoder of four layers on half of R8. The gradients are of the "
        "other halves. The file also has each layer kind,\nthe relative errors and the saved "
        "bytes.\n\n"
        + source("gradients", document)
        + table(
            head,
            [
                [label(case), *(cell(case, ratio) for ratio in columns)]
                for case in dict.fromkeys(map(way, rows))
            ],
        )
        + "\nListed models with **random weights**, on random images, "
        f"{document['random_batches']} batches of {document['random_batch_size']}. These are no "
        "gradients of fine-tuning; batch norms of\nrandom weights enlarge any error.\n\n"
        + random_gradients(document["random_rows"])
    )


def random_gradients(rows: list[Row]) -> str:
    """The cosines of models with random weights; a ratio without a row cannot be met."""
    rows = [row for row in rows if not row["int8_forward"]]
    found = {(r["task"], r["method"], r["ratio"]): r["closeness"]["all"]["cosine"] for r in rows}
    ways = list(dict.fromkeys((r["method"], r["ratio"]) for r in rows))

    def cell(*key: object) -> str:
        return f"{found[key]:.3f}" if key in found else "cannot be met"

    return table(
        ["model", *(f"{label(case)}{f' {ratio}' if ratio else ''}" for case, ratio in ways)],
        [
            [f"`{task}`", *(cell(task, *one) for one in ways)]
            for task in dict.fromkeys(row["task"] for row in rows)
        ],
    )


def finetuning(name: str) -> str:
    document = load(name)
    rows = document["rows"]
    seeds = len({row["seed"] for row in rows})
    one = document["settings"]["fashion"]
    rates = " and ".join(f"{document['settings'][task]['lr']:g}" for task in TASKS)

    def cells(case: str, task: str) -> Cells:
        mine = [r for r in rows if (r["case"], r["task"]) == (case, task)]
        if not mine:
            return "", ""
        accuracies = [r["accuracy"] for r in mine]
        spread = f" ({min(accuracies):.4f} to {max(accuracies):.4f})" if seeds > 1 else ""
        share = mine[0]["saved_bytes"] / mine[0]["full_saved_bytes"]
        return f"{fmean(accuracies):.4f}{spread}", f"{share:.0%}"

    diverged = sum(row["diverged"] for row in rows)
    return (
        f"Test accuracy after {one['steps']} steps of {one['optimizer']}, batch "
        f"{one['batch_size']}, ratio {one['ratio']}, one learning rate for\nall methods ({rates}), "
        + (f"{seeds} seeds: mean (least to most)" if seeds > 1 else "one seed")
        + f", on {one['test_rows']:,} test examples: ViT-S/14 at {one['pixels']} px, and\nthe BERT "
        f"at {document['settings']['r8']['tokens']} tokens. "
        f"{'No loss' if not diverged else f'{diverged} losses'} diverged.\n\n"
        + source(name, document)
        + table(
            ["method", *(text for task in TASKS for text in (TASKS[task], "saved"))],
            [
                [label(case), *(cell for task in TASKS for cell in cells(case, task))]
                for case in ordered(row["case"] for row in rows)
            ],
        )
    )


def end_to_end() -> str:
    document = load("end_to_end")
    rows = document["rows"]
    shares = {"accuracy": "accuracy", "mean_iou": "mean IoU", "perplexity": "perplexity"}

    def line(task: str, case: str) -> list[object]:
        mine = [r for r in rows if (r["task"], r["case"]) == (task, case)]
        values = [r["metrics"][r["metric"]] for r in mine]
        form = ".2f" if mine[0]["metric"] == "perplexity" else ".4f"
        return [
            f"{document['settings'][task]['summary']}: {shares[mine[0]['metric']]}",
            label(case),
            f"{fmean(values):{form}} ({', '.join(format(value, form) for value in values)})",
            f"{mine[0]['saved_bytes'] / mine[0]['full_saved_bytes']:.0%}",
            mine[0]["steps"],
        ]

    cases = list(dict.fromkeys((r["task"], r["case"]) for r in rows))
    return (
        "From files to the test, with `razorctl.finetune`, fp32, AdamW, ratio "
        f"{document['ratio']}: the mean, and "
        "each seed.\n"
        "The backbone of the segmenter and the decoder are those that the bench trained before.\n\n"
        + source("end_to_end", document)
        + table(
            ["task", "method", "on the test split", "saved", "steps"], [line(*c) for c in cases]
        )
    )
