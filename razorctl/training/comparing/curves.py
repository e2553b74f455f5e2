"""Curves of the training loss and of the task's figure, over steps and over seconds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from razorctl.training.comparing.finished_run import FinishedRun

POINTS = 100  # of a curve of losses, at most


@dataclass(frozen=True)
class Curve:
    """Values, each with the steps and the seconds of training before it."""

    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]

    def per(self, unit: float) -> "Curve":
        """The curve with its values in another unit."""
        return replace(self, values=[value / unit for value in self.values])


def losses(run: FinishedRun, name: str = "loss") -> Curve:
    """The training losses of a run; in a long run each point is a mean over several steps.

    name: another number of each step.
    """
    width = math.ceil(run.result["job"]["steps"] / POINTS)
    seconds = _seconds(run)
    parts = [range(at, min(at + width, len(seconds))) for at in range(0, len(seconds), width)]
    return Curve(
        [part[-1] + 1 for part in parts],
        [seconds[part[-1]] for part in parts],
        [fmean(run.steps[index][name] for index in part) for part in parts],
    )


def scores(run: FinishedRun) -> Curve:
    """The figure of the task at each evaluation of a run."""
    seconds = _seconds(run)
    at = [index for index, step in enumerate(run.steps) if step["metrics"] is not None]
    return Curve(
        [index + 1 for index in at],
        [seconds[index] for index in at],
        [run.of(run.steps[index]) for index in at],
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of the curves of several seeds, up to the end of the shortest."""

    def mean(columns: Iterable[Sequence[float]]) -> list[float]:
        return [fmean(values) for values in zip(*columns, strict=False)]

    return Curve(
        mean(curve.steps for curve in curves),
        mean(curve.seconds for curve in curves),
        mean(curve.values for curve in curves),
    )


def _seconds(run: FinishedRun) -> list[float]:
    return list(accumulate(step["seconds"] for step in run.steps))
