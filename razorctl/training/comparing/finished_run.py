"""A finished run, read from its directory."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from razorctl.config.job import Job
from razorctl.config.settings import read_toml
from razorctl.config.tasks import FIGURES, LEAST
from razorctl.errors import DataError, UsageError
from razorctl.system import documents
from razorctl.training.run_files import ENVIRONMENT, check_files
from razorctl.training.rundir import CONFIG, METRICS, RESULT
from razorctl.training.schemas import RunResult, StepLine
from razorctl.version import __version__

LEAVE = "leave it out, or run it again"  # how to mend a damaged run


@dataclass(frozen=True)
class FinishedRun:
    """A run directory: its result, the lines of its metrics.jsonl, and its environment.

    together: whether it is compared with runs of other metrics.
    """

    directory: Path
    result: dict[str, Any]
    steps: list[dict[str, Any]]
    environment: dict[str, Any]
    together: bool = False

    @property
    def figure(self) -> str:
        """The figure that scores are: the metric of the run, or the first figure of its task."""
        job = self.result["job"]
        metric = None if self.together else job["metric"]
        return metric or FIGURES[job["task"] or "classification"][0]

    def of(self, evaluated: Mapping[str, Any]) -> float:
        """The value of `figure` in the result or in an evaluated step; None stands for infinity."""
        value = evaluated["metrics"][self.figure]
        return math.inf if value is None else float(value)

    @property
    def score(self) -> float:
        """The final value of `figure`."""
        return self.of(self.result)

    @property
    def judged(self) -> float:
        """The last evaluation during training, the higher the better."""
        last = next(step for step in reversed(self.steps) if step["metrics"] is not None)
        return -self.of(last) if self.figure in LEAST else self.of(last)

    @property
    def best(self) -> float:
        """The best value of `figure` in the run's evaluations."""
        values = [self.of(step) for step in self.steps if step["metrics"] is not None]
        return min(values) if self.figure in LEAST else max(values)

    def time_to(self, target: float) -> float | None:
        """Seconds of training until an evaluation and all later ones reach `target`; None if none.

        The time of evaluations does not count.
        """
        seconds, reached = 0.0, None
        for step in self.steps:
            seconds += step["seconds"]
            if step["metrics"] is None:
                continue
            value = self.of(step)
            misses = value > target if self.figure in LEAST else value < target
            if misses:
                reached = None
            elif reached is None:
                reached = seconds
        return reached


def read_run(directory: Path) -> FinishedRun:
    """The finished run in a directory.

    Raises UsageError if the run is not finished or is of another version of razorctl, and DataError
    if its files are damaged.
    """
    environment = read_toml(directory / CONFIG).get(ENVIRONMENT, {})
    tables = {ENVIRONMENT: environment}
    documents.check_tables(tables, Mapping[str, Mapping[str, str | int]], directory / CONFIG, LEAVE)
    razorctl = environment.get("razorctl")
    if razorctl != __version__:
        raise UsageError(
            f"{directory} was run by razorctl {razorctl}, not {__version__}; run it again."
        )
    try:
        result = documents.read(directory / RESULT, RunResult, LEAVE)
        lines = documents.read_lines(directory / METRICS, StepLine, LEAVE)
    except FileNotFoundError:
        raise UsageError(
            f"{directory} holds no finished run; leave it out, or run it again with "
            f"`razorctl --config {directory / CONFIG} finetune`."
        ) from None
    check_files(directory, result, [METRICS])
    settings = asdict(Job(**result["job"]))  # with the defaults of later settings
    run = FinishedRun(directory, {**result, "job": settings}, lines, environment)
    evaluated = [step for step in lines if step["metrics"] is not None]
    complete = all(run.figure in each["metrics"] for each in (result, *evaluated))
    if len(lines) != result["steps"] or not evaluated or not complete:
        raise DataError(f"{directory / METRICS} is damaged; {LEAVE}.")
    return run
