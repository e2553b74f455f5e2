"""The progress of runs on stderr: a live bar, or lines where there is no terminal."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from razorctl.cli.views import common as views
from razorctl.cli.views import finetune as view
from razorctl.cli.views.common import Pulse
from razorctl.cli.views.evaluate import note_skipped
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import Terminated
from razorctl.system import processes
from razorctl.training import run_files, rundir
from razorctl.training.checkpoints import left
from razorctl.training.signals import noted
from razorctl.training.trackers import tracked
from razorctl.units import against, count, duration, size

if TYPE_CHECKING:
    from pathlib import Path

    from razorctl.training.comparing.grid import Grid
    from razorctl.training.comparing.grid import Progress as Standing
    from razorctl.training.metrics import Step
    from razorctl.training.run import Run

APART = 5.0  # least seconds between two lines
TIMED = range(2, 7)  # steps whose time is extrapolated to the run; the first step warms up


class _DryRunError(Exception):
    """Ends a dry run. The run's directory is removed, as after any error in its preparation."""


def prepare_only(
    begin: Callable[..., object], job: Job, recipe: Recipe, device: str | None
) -> "Run":
    """Prepares a run and returns it; prints what `train` prints before the first step.

    begin: begins the run, with the keywords `progress` and `prepared` of `training.run.finetune`.
    """
    runs: list[Run] = []

    def end(run: "Run") -> None:
        runs.append(run)
        raise _DryRunError

    view.show_header(job, recipe, None, device)
    with views.status("loading PyTorch") as at, suppress(_DryRunError):
        begin(progress=at, prepared=end)
    _announce(runs[0], job, device, "")
    return runs[0]


def _announce(run: "Run", job: Job, device: str | None, where: str) -> None:
    """Prints notes and settings before the first step; where: the file with the skipped rows."""
    from razorctl.system import devices  # the run's preparation has loaded torch already

    note_skipped(run.skipped, where)
    for sentence in run.notes:
        views.note(sentence)
    view.show_settings(run, job, device, devices.name(run.device))
    if run.sample is not None and not run.history:
        view.show_sample(run.sample)


def train(
    prepare: Callable[[Callable[[str], None]], "Run"],
    job: Job,
    recipe: Recipe,
    out: "Path",
    device: str | None,
    trackers: Sequence[str] = (),
) -> "Run":
    """Prepares a run, trains it and returns it; prints its settings and progress.

    The first signal during training ends the run after a step, with a checkpoint.

    Args:
        prepare: returns the run of `job` and `recipe`; it calls its argument with each stage.
        job: what to train.
        recipe: how to prune.
        out: the directory of the run.
        device: the name that the user gave, if any.
        trackers: the result of `trackers.check_trackers`.
    """
    view.show_header(job, recipe, out, device)
    resumed = run_files.read_settings(out) is not None
    run: Run | None = None
    try:
        with views.status("loading PyTorch") as at:
            run = prepare(at)
        _announce(run, job, device, f"; {out / rundir.SPLIT} has their numbers")
        with noted() as run.stop:
            steps = _with_time_left(run, tracked(run, trackers if processes.first() else ()))
            if views.live():
                _bar(run, steps)
            else:
                _lines(run, steps)
    except Exception:
        if run is not None:
            run.rescue()
        raise
    except (KeyboardInterrupt, Terminated) as stop:
        if resumed or run_files.read_settings(out) is not None:
            stop.add_note(
                f"{left(out)}; continue with `{rundir.resuming(out, device, job.processes)}`"
            )
        else:
            stop.add_note("before the first step; nothing was written")
        raise
    return run


def _with_time_left(run: "Run", steps: Iterable["Step"]) -> Iterator["Step"]:
    """The steps of a run; after the steps of TIMED a line tells the time that is left.

    A planned run has no such line, nor has a run that ends within APART.
    """
    seconds: list[float] = []
    for number, step in enumerate(steps, start=1):
        yield step
        if number in TIMED:
            seconds.append(step.seconds)
        left = (run.job.steps or 0) - step.step
        if number == TIMED[-1] and run.predicted is None and left * median(seconds) >= APART:
            each = median(seconds)
            views.say(f"about {duration(each * left)} left: a step takes {duration(each)}")


def _progress(*columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=views.err, transient=True)


def _bar(run: "Run", steps: Iterable["Step"]) -> None:
    """Trains under a live bar that fits 80 columns."""
    less = against(run.saved_bytes, run.full_saved_bytes)
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]} {task.fields[figures]}"),
        TextColumn(f"[green]stored {size(run.saved_bytes)}, {less}"),
        TextColumn("{task.fields[rate]}/s"),
        TimeRemainingColumn(compact=True),
    )
    with _progress(*columns) as bar:
        total, done = run.job.steps, len(run.history)
        task = bar.add_task("", total=total, completed=done, loss="-", figures="", rate="-")
        for step in steps:
            rate = f"{step.samples_per_second:,.0f}"
            bar.update(task, completed=step.step, loss=f"{step.loss:.2f}", rate=rate)
            if step.metrics is not None:
                bar.update(task, figures=_figures(run, step, "acc"))


def _figures(run: "Run", step: "Step", accuracy: str = "accuracy") -> str:
    """The accuracy of an evaluated step, if any, and the metric that chooses the weights.

    accuracy: the word for accuracy.
    """
    assert step.metrics is not None
    words = [] if step.accuracy is None else [f"{accuracy} {step.accuracy:.3f}"]
    if run.metric not in ("accuracy", "loss"):
        words.append(f"{run.metric.replace('_', ' ')} {step.metrics[run.metric]:.4g}")
    return ", ".join(words)


def _lines(run: "Run", steps: Iterable["Step"]) -> None:
    """Trains with a line for each evaluation, and for each tenth of the steps.

    The line of a tenth is left out within APART seconds of another line.
    """
    total, start, figures, done = run.job.steps or 0, time.monotonic(), "", len(run.history)
    with Pulse("the first step") as pulse:
        for step in steps:
            if step.metrics is not None:
                words = _figures(run, step)
                figures = f", {words}" if words else ""
            text = f"step {step.step:,} of {total:,}: loss {step.loss:.2f}{figures}"
            text += f", {step.samples_per_second:,.0f}/s"
            if run.peak_bytes is not None:
                text += f", peak {size(run.peak_bytes)}"
            seconds = (time.monotonic() - start) / (step.step - done)
            if seconds_left := seconds * (total - step.step):
                text += f", {duration(seconds_left)} left"
            tenth = 10 * step.step // total > 10 * (step.step - 1) // total
            if step.metrics is not None or (tenth and pulse.silence >= APART):
                pulse.say(text)
            pulse.update(text)


@contextmanager
def count_rows(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows the number of done rows inside the block; yields the function that sets it.

    total: the number of all rows; None if it is unknown.
    """
    if not views.live():
        end = "" if total is None else f" of {total:,}"
        with Pulse(f"{what}, 0{end}") as pulse:
            yield lambda done: pulse.update(f"{what}, {done:,}{end}")
        return
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=None))
    with _progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def run_grid(grid: "Grid") -> None:
    """Runs a grid under a live bar, or with a line at the begin and the end of each run."""
    from razorctl.training.comparing.variants import summary

    seeds = count(len(grid.seeds), "seed")
    views.say(
        f"{views.title(grid.job.model, grid.job.dataset)}: {', '.join(grid.methods)}"
        f"{summary(grid.lists)}; {seeds}"
    )
    views.say(f"directory: {grid.out}")
    try:
        late = _grid_bar(grid) if views.live() else _grid_lines(grid)
    except (KeyboardInterrupt, Terminated) as stop:
        stop.add_note(grid.left)
        raise
    if late:
        views.note(f"the budget is spent; {grid.left}.")


def _grid_bar(grid: "Grid") -> bool:
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with _progress(*columns) as bar:
        task = bar.add_task("", total=None)

        def report(at: "Standing") -> None:
            done = at.run + (1 if at.end else at.step / (at.steps or 1))
            bar.update(task, total=at.runs, completed=done, description=_standing(at))

        return grid.run(report)


def _grid_lines(grid: "Grid") -> bool:
    with Pulse() as pulse:
        begun: set[int] = set()

        def report(at: "Standing") -> None:
            text = f"run {at.run + 1} of {at.runs}: {_standing(at)}"
            if at.run in begun and at.end is None:
                pulse.update(text)
            else:
                pulse.say(text)
            begun.add(at.run)

        return grid.run(report)


def _standing(at: "Standing") -> str:
    steps = "starting" if at.steps is None else f"step {at.step:,} of {at.steps:,}"
    return f"{at.method}, seed {at.seed}: {at.end or steps}"
