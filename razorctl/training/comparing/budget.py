"""The budget of a comparison: time of training, divided equally over its runs."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from razorctl.errors import UsageError
from razorctl.system import documents
from razorctl.training.rundir import METRICS, RESULT

UNITS = {"s": 1, "m": 60, "h": 3600}
# Steps of a probe, and the last of them, whose median counts: with --compile they are compiled.
PROBE, TIMED = 12, 5
POINTS = 10  # evaluations of a run, at least


def parse_seconds(text: str) -> float:
    """The seconds of a text such as 90s, 10m or 1.5h; raises UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh])", text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"budget {text!r} is no time; give one such as 90s, 10m or 1.5h.")
    return float(match[1]) * UNITS[match[2]]


class Cost(NamedTuple):
    """Seconds of a step, and of compiling before it."""

    step: float
    compiling: float = 0.0


def probe_cost(probe: Path) -> Cost:
    """The cost of the run in the directory of a probe."""
    lines = (probe / METRICS).read_text("utf-8").splitlines()
    step = median(float(documents.parse(line)["seconds"]) for line in lines[-TIMED:])
    payoff = documents.parse(documents.read_bytes(probe / RESULT)).get("payoff")
    return Cost(step, payoff["compile_seconds"] if payoff else 0.0)


def steps_by_method(costs: Mapping[str, Cost], share: float, runs: float) -> dict[str, int]:
    """The steps of each method that take a run's share of the budget, or a little less.

    share: in seconds. runs: the number of shares in the budget. Raises UsageError if a share is
    less than a step of one of the methods.
    """
    slowest = max((each.compiling + each.step for each in costs.values()), default=0.0)
    if slowest > share:
        raise UsageError(
            f"the budget is too small for one step of each run; give --budget "
            f"{math.ceil(slowest * runs)}s or more."
        )
    return {m: int((share - each.compiling) / each.step) for m, each in costs.items()}


def evaluate_every(steps: int) -> int:
    """Steps between the evaluations of a run, so that a curve has POINTS points or a few more."""
    return max(1, steps // POINTS)
