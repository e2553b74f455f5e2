"""Checks what `plan` chooses, over cards, memory sizes and models.

    .venv/bin/python scripts/bench/choices.py

Every choice has to fit. No row that fits may be at most as approximate and also faster, or as fast
and smaller. With more memory, the predicted step of a preference may not be slower, but for the 2 %
within which times count as the same; of an approximate way that `balanced` takes, the slow end of
the range counts. The script writes results/choices.json and exits with 1 if a choice breaks a rule.
It measures nothing: every figure is predicted, on fake tensors.
"""

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import get_args

from record import head, options, write

from razorctl import data, models
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.planning import gpus
from razorctl.planning.candidates import Candidate
from razorctl.planning.search import SAME, Prefer, Search

GPUS = ("rtx-2080-ti", "rtx-4090", "a100-80gb", "t4")
MODELS = ("vit-b16", "vit-l16", "bert-base")
LIBRARIES = ("torch", "timm", "transformers")
MEMORIES = (2, 4, 6, 8, 11, 16, 24, 40)  # GiB


@dataclass(frozen=True)
class Row:
    """A choice. Its figures are None if nothing fits; `faults` are the rules that it breaks."""

    gpu: str
    memory_gib: int
    model: str
    prefer: Prefer
    label: str | None
    exact: bool | None
    needed_bytes: int | None
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    faults: tuple[str, ...]


def counts(way: Candidate, prefer: Prefer) -> float:
    """The seconds of a step that a preference compares."""
    return way.slow if prefer == "balanced" and not way.exact else way.seconds


def dominates(way: Candidate, chosen: Candidate, prefer: Prefer) -> bool:
    """Whether `way` is at most as approximate as `chosen`, and faster, or as fast and smaller."""
    if way.approximation > chosen.approximation:
        return False
    sizes = way.predicted.needed_bytes, chosen.predicted.needed_bytes
    return (counts(way, prefer), sizes[0]) < (counts(chosen, prefer), sizes[1])


def rows(gpu: str, model: str) -> Iterator[Row]:
    """The choices of every preference on a card, from the least memory to the most."""
    card, entry = gpus.load(gpu), models.named(model)
    dataset = data.usual(entry.tasks[0], entry.modality)
    before: dict[Prefer, Candidate] = {}
    for gib in (gib for gib in MEMORIES if gib << 30 <= card.memory_bytes):
        search = Search(Job(model, dataset), card, gib << 30, None)
        choices = {prefer: search.choose(prefer) for prefer in get_args(Prefer)}
        for prefer, chosen in choices.items():
            if chosen is None:
                faults = ["fitted in less memory"] if prefer in before else []
                yield Row(gpu, gib, model, prefer, *[None] * 6, tuple(faults))
                continue
            faults = [] if chosen.fits(gib << 30) else ["does not fit"]
            for way in search.rows:
                if way.fits(gib << 30) and dominates(way, chosen, prefer):
                    faults.append(f"dominated by {way.label}")
            if prefer in before and counts(chosen, prefer) > SAME * counts(before[prefer], prefer):
                faults.append(f"slower than {before[prefer].label} in less memory")
            before[prefer] = chosen
            yield Row(
                *(gpu, gib, model, prefer, chosen.label, chosen.exact),
                *(chosen.predicted.needed_bytes, chosen.seconds),
                *(chosen.predicted.step_seconds_low, chosen.slow),
                tuple(faults),
            )


def main() -> int:
    parser = options(__doc__, "choices")
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    choices = []
    for model in args.models:
        for gpu in args.gpus:
            for row in rows(gpu, model):
                words = row.label or "nothing fits"
                print(row.gpu, f"{row.memory_gib} GiB", row.model, row.prefer, words, *row.faults)
                choices.append(row)
    document = {
        **head(f"none; traced on a CPU, {platform.machine()}", *LIBRARIES),
        "rows": [asdict(row) for row in choices],
    }
    write(args.out, document)
    return 1 if any(row.faults for row in choices) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(str(error))
