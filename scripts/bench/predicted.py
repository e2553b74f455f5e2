"""Predicts the step of ViT-B/16 with razor at several ratios, on cards that need not be here.

    .venv/bin/python scripts/bench/predicted.py [--ratios 0.9 0.97] [--gpus rtx-4090]

Each step is one of 128 images, in bf16 or, where a card lacks that, in fp16. The script prints the
likely milliseconds with the least and the most, the share of full's, and the bytes that are kept
and allocated at most; with --out it writes them too. To compare two commits, run it on both. It
measures nothing: every figure is predicted, on fake tensors.
"""

import platform
import sys
from dataclasses import asdict, dataclass

from record import head, options, write
from roofline import SHOWN

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.memory import trace_cache as traces
from razorctl.planning import gpus
from razorctl.planning.search import Search
from razorctl.units import size

MODEL, DATA, BATCH = "vit-b16", "cifar100", 128
RATIOS = (0.9, 0.95, 0.97)
TIMES = ("step_seconds_low", "step_seconds", "step_seconds_high", "step_seconds_vs_full")
LIBRARIES = ("torch", "timm")


@dataclass(frozen=True)
class Row:
    """The predicted step of razor at a ratio on a card; seconds, and bytes."""

    gpu: str
    precision: str
    ratio: float
    step_seconds_low: float
    step_seconds: float
    step_seconds_high: float
    step_seconds_vs_full: float
    saved_bytes: int
    peak_bytes: int


def row(gpu: str, ratio: float, cache: traces.Cache) -> Row:
    card = gpus.load(gpu)
    precision = "bf16" if "bf16" in card.rates else "fp16"
    job = Job(MODEL, DATA, batch_size=BATCH, precision=precision)
    step = Search(job, card, card.memory_bytes, None, cache).predict(Recipe(ratio=ratio)).predicted
    return Row(
        *(gpu, precision, ratio),
        *(step.step_seconds_low, step.step_seconds, step.step_seconds_high),
        *(step.step_seconds_vs_full, step.saved_bytes, step.peak_bytes),
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gpus", nargs="+", default=SHOWN)
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    args = parser.parse_args()
    rows, cache = list[Row](), traces.Cache()
    for gpu in args.gpus:
        for ratio in args.ratios:
            rows.append(row(gpu, ratio, cache))
            low, likely, high, share = (getattr(rows[-1], name) for name in TIMES)
            times = f"{1e3 * likely:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"
            kept = f"keeps {size(rows[-1].saved_bytes)}, peak {size(rows[-1].peak_bytes)}"
            print(f"{gpu} {ratio:g}: {times}, {share:.3f} of full, {kept}", flush=True)
    if args.out:
        device = f"none; traced on a CPU, {platform.machine()}"
        write(args.out, {**head(device, *LIBRARIES), "rows": [asdict(each) for each in rows]})


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(str(error))
