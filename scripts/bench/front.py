"""The tables and figures of README.md, from results/*.json. report.py writes them there."""

import math
from textwrap import fill

from pages import GIB, load, table
from tables import (
    NONE,
    SUBJECTS,
    every_listed,
    grid,
    trained,
    way,
    whole,
)

from razorctl.planning.gpus import OLDEST

COMPILED = "full, compiled"
SCORED = {  # task -> model and what it learns
    "decoder": "Llama, texts",
    "instructions": "Llama, instructions",
    "fashion": "ViT-S, classes",
    "labels": "ViT-S, several labels",
    "r8": "BERT, topics",
    "topics": "BERT, several topics",
    "spam": "BERT, spam",
    "tags": "BERT, names",
    "tweets": "BERT, ratings",
    "scenes": "MobileNetV2, masks",
    "squeezenet": "SqueezeNet, classes",
    "objects": "RT-DETR, boxes",
}
HEADLINE = {
    "full fine-tuning": "full",
    "full fine-tuning, compiled": COMPILED,
    "checkpointing": "checkpoint",
    "razor, ratio 0.9, CUDA graphs": "razor, CUDA graphs",
    "razor, ratio 0.9, without CUDA graphs": "razor",
}
# Case -> options, when to use it, and its gradient.
USES = {
    "full": ("--method full", "it fits", "exact"),
    COMPILED: ("--method full --compile", "it fits, and steps must be fast", "exact"),
    "accumulate 8": ("--method full --accumulate 8", "a slow step is no matter", "exact"),
    "checkpoint": ("--method checkpoint", "optimizer state decides, as of decoders", "exact"),
    "razor": ("--ratio 0.9", "activations decide: large batches, images, texts", ""),
    "razor, ratio 0.97": ("--ratio 0.97", "they still do", ""),
    "lora": ("--lora --method full", "weights and state do not fit", "of adapters"),
}


def measured_steps() -> dict[str, tuple[float, float, float, str]]:
    """Case -> peak in bytes, peak and step time relative to `full` on the same card, the card."""
    steps = {}
    for name in ("step_cuda", "phases_cuda"):  # the later results last
        document = load(name)
        rows = {row["case"]: row for row in document["rows"] if row.get("precision") != "fp32"}
        full = rows["full"]
        for case, row in rows.items():
            if row["step_seconds"]:
                both = (row[key] / full[key] for key in ("peak_bytes", "step_seconds"))
                steps[case] = row["peak_bytes"], *both, document["device"].split()[1]
    return steps


def headline() -> str:
    """What a step takes on the cards that have run it, by method."""
    lines = []
    for name, case in HEADLINE.items():
        peak, share, times, card = measured_steps()[case]
        lines.append([name, f"{peak / GIB:.2f} GiB", f"{share:.0%}", f"{times:.2f}", card])
    head = ["ViT-B/16, batch 128, bf16", "peak memory", "of full fine-tuning", "step time", "on"]
    return table(head, lines)


def uses() -> str:
    """What each way takes, and when to use it."""
    memory, steps, cards = load("memory"), load("frontier_cpu"), measured_steps()
    rows = [row for row in memory["rows"] if row["model"] == memory["rows"][0]["model"]]
    peaks = {r["case"]: r["peak_bytes"] / GIB for r in rows if r["precision"] == "bf16"}
    peaks[COMPILED] = cards[COMPILED][0] / GIB
    named = {"razor at 0.9": "razor", "razor at 0.97": "razor, ratio 0.97"}
    named["accumulate 2"] = "accumulate 8"  # a quarter of the batch was timed, an eighth traced
    times = {named.get(r["case"], r["case"]): r["step_time_vs_full"] for r in steps["rows"]}
    compiled = (row for row in load("step_cpu")["rows"] if row["case"] == COMPILED)
    times[COMPILED] = next(compiled)["step_time_vs_full"]
    cosines = {
        ratio: f"{whole(row):.3f}"
        for row in load("gradients")["rows"]
        for ratio in (row["ratio"],)
        if (row["task"], row["precision"], way(row)) == ("fashion", "bf16", "razor")
    }
    lines = []
    for case, (options, when, gradient) in USES.items():
        captured = case.replace(", ratio", " at") + ", CUDA graphs"
        on_card = cards.get(captured if "razor" in case else case)
        lines.append(
            [
                f"`{options}`",
                f"{peaks[case]:.2f} GiB",
                f"{on_card[2]:.2f}" if on_card else "not timed",
                f"{times[case]:.2f}" if case in times else "not timed",
                cosines[0.97 if "0.97" in case else 0.9] if "razor" in case else gradient,
                when,
            ]
        )
    head = ["way", "peak, bf16", "step, GPU", "step, CPU", "gradient", "when"]
    return table(head, lines)


def by_model() -> str:
    """The cosines of `razor` by model: of gradients, of the worst parameter, and of updates."""
    row_of = {(r["task"], r["precision"], way(r), r["ratio"]): r for r in load("gradients")["rows"]}

    def gradient(task: str, ratio: float) -> str:
        full = row_of[task, "bf16", "full", None]
        return f"{whole(row_of[task, 'bf16', 'razor', ratio]):.3f} ({whole(full):.3f})"

    def worst(task: str, ratio: float) -> str:
        return f"{row_of[task, 'bf16', 'razor', ratio]['worst']['cosine']:.3f}"

    def update(task: str, ratio: float) -> str:
        both = row_of[task, "bf16", "razor", ratio], row_of[task, "bf16", "full", None]
        ours, full = (row["update"]["cosine"] for row in both)
        return f"{ours:.3f} ({full:.3f})"

    return grid(
        "bf16 (of full fine-tuning)",
        {
            "gradient, ratio 0.9": (gradient, 0.9),
            "gradient, ratio 0.97": (gradient, 0.97),
            "its worst parameter, 0.9": (worst, 0.9),
            "update of AdamW after 20 steps, 0.9": (update, 0.9),
        },
        {name: task for task, name in SUBJECTS.items()},
        lambda what, task: what[0](task, what[1]),
    )


def scores() -> str:
    """How far `razor` ends from full fine-tuning on each task."""
    rows = {key: row for key, (*_, row) in trained().items()}
    parts = []
    for task in SCORED:
        each = []
        for precision, case in (("bf16", "razor"), ("fp32", "razor"), ("fp32", "razor at 0.97")):
            row = rows.get((task, precision, case))
            if row is None or row["error"]:
                each.append(NONE)
                continue
            full = rows[task, precision, "full"]["accuracy_mean"]
            relative = row["metric"] == "perplexity"
            points = 100 * row["delta_vs_full"] / (full if relative else 1)
            each.append(f"{round(points, 2 if relative else 1) + 0.0:+.{2 if relative else 1}f}")
            each[-1] += " %" * relative
        if set(each) != {NONE}:
            parts.append(f"{SCORED[task]} {' / '.join(each)}")
    return fill("; ".join(parts) + ".", 156, break_on_hyphens=False) + "\n"


def figures() -> dict[str, tuple[object, ...]]:
    """Sentence of README.md with {} for each figure -> the figures."""
    memory, facts, fits = load("memory"), load("facts"), load("fits")
    stored = {(r["model"], r["precision"], r["case"]): r["saved_bytes"] for r in memory["rows"]}
    most = max(r["saved_bytes"] / r["full_saved_bytes"] for r in every_listed())
    high = max(
        share / stored[model, precision, "full"]
        for (model, precision, case), share in stored.items()
        if case == "razor, ratio 0.97"
    )
    cosine = next(
        whole(row)
        for row in load("gradients")["rows"]
        if (row["task"], row["precision"], way(row), row["ratio"])
        == ("fashion", "bf16", "razor", 0.9)
    )
    seeds = [document["settings"]["seeds"] for _, document, _ in trained().values()]
    return {
        "in a few bits ({} % of the usual bytes; {} % at `--ratio 0.97`)": (
            math.ceil(100 * most),
            math.ceil(100 * high),
        ),
        "It takes {} GB.": (round(facts["installed_bytes"] / 1e9),),
        "compute capability {} (": (".".join(map(str, OLDEST)),),
        "(predicted; up to {}; bf16; razor at ratio {})": (f"{fits['most']:,}", fits["ratio"]),
        "1 is exact, {} an orthogonal error of {} %.": (
            f"{cosine:.3f}",
            round(100 * math.sqrt(1 - round(cosine, 3) ** 2)),
        ),
        "fp32 0.97, {} to {} seeds": (min(seeds), max(seeds)),
        "that was trained has {}M weights": (round(facts["most_weights"] / 1e6),),
    }
