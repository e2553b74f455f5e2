"""A grid of methods and seeds: one run after the other, each in its own process.

A grid's directory holds `comparison.toml` and a run directory for each method and seed.
`comparison.toml` has the shared settings in the layout of a razorctl.toml, the methods and seeds,
and with a budget the steps of each method. The directory of a failed run has a `failure.json`.
`comparison.of_grid` reads all this.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from razorctl import data, units
from razorctl.config.registry import unknown
from razorctl.config.settings import read_toml
from razorctl.errors import RazorError, UsageError
from razorctl.job import Job
from razorctl.recipe import Recipe
from razorctl.training import atomic, run_files, rundir
from razorctl.training.comparing import budget
from razorctl.training.comparing.child import run_child
from razorctl.training.comparing.commands import Commands
from razorctl.training.comparing.comparison import (
    NAMES,
    SETTINGS,
    Comparison,
    FinishedRun,
    note_failure,
    of_grid,
    read_run,
    settings_of,
)
from razorctl.version import __version__


@dataclass(frozen=True)
class Progress:
    """The progress of a grid.

    run: index of the current run, from 0. runs: their number. step, steps: steps done and in all
    in this run; `steps` is None until it is known. end: the run's outcome; None until it ends.
    """

    run: int
    runs: int
    method: str
    seed: int
    step: int = 0
    steps: int | None = None
    end: str | None = None


class Grid:
    """Runs of methods and seeds, one after the other, each in its own process.

    With a budget, `measure` settles how many steps each method has; `run` trains.
    """

    def __init__(
        self,
        job: Job,
        methods: Sequence[str],
        *,
        ratio: float = Recipe.ratio,
        seeds: int = 1,
        seconds: float | None = None,
        device: str | None = None,
        out: Path | None = None,
        resume: bool = False,
    ) -> None:
        """Checks the settings and makes the directory.

        methods: names in NAMES. seeds: number of seeds, counted up from the job's. seconds: of
        training, for all runs together. out: the directory to make; with `resume` it may exist,
        and its finished runs are not run again.
        Raises UsageError for settings that no run can use, and for a directory that exists
        without `resume`, belongs to other settings or cannot be written.
        """
        if seeds < 1:
            raise UsageError(f"seeds {seeds} is too few; give 1 or more.")
        if seconds is not None and (job.steps or job.epochs):
            what = "steps" if job.steps else "epochs"
            raise UsageError(f"{what} and a budget cannot both be set; give one of them.")
        self.methods = list(dict.fromkeys(methods))
        for name in self.methods:
            if name not in NAMES:
                raise unknown("method", name, NAMES)
        if job.cuda_graphs:
            from razorctl import devices  # imports torch
            from razorctl.training.compiled import refuse_uncompilable

            refuse_uncompilable(job, Recipe(), devices.find(device))
        # By its absolute path, as in the runs, so that it can be resumed from any directory.
        self.job = replace(job, dataset=data.place(job.dataset))
        self.ratio, self.device, self.seconds = ratio, device, seconds
        self.seeds = range(job.seed, job.seed + seeds)
        self.out = out or rundir.choose(None, "compare", job.model, job.dataset)
        self.commands = Commands(self.job, self.methods, ratio, device, self.out / SETTINGS)
        self._unmeasured: dict[str, RazorError] = {}  # methods of which no step could be measured
        self._prepare(resume)

    def _prepare(self, resume: bool) -> None:
        """Makes the directory, or with `resume` checks that it has the same settings."""
        job = {k: v for k, v in asdict(self.job).items() if v is not None and k != "seed"}
        environment = {"razorctl": __version__, "device": self.device}
        settings = {
            "job": job,
            "recipe": {"ratio": self.ratio},
            "environment": {k: v for k, v in environment.items() if v is not None},
            "limits": {} if self.seconds is None else {"budget": self.seconds},
        }
        runs: dict[str, Any] = {"methods": self.methods, "seeds": list(self.seeds)}
        if self.seconds is not None:
            runs |= {"share": self.seconds / (len(self.methods) * len(self.seeds)), "steps": {}}
        if not self.out.exists():
            with atomic.writing(self.out):
                self.out.mkdir(parents=True)
            self._write(settings, runs)
            return
        if not resume:
            raise atomic.taken(self.out, begun=True)
        if not (self.out / SETTINGS).exists():
            raise UsageError(f"{self.out} holds no comparison; name another directory with --out.")
        earlier = settings_of(self.out)
        _refuse_other(self.out, earlier, settings)
        earlier_runs = earlier.get("runs", {})  # their methods and seeds stay in the grid
        for name in ("methods", "seeds"):
            earlier_runs[name] = list(dict.fromkeys([*earlier_runs.get(name, []), *runs[name]]))
        self._write(settings, runs | earlier_runs)

    def _write(self, settings: Mapping[str, dict[str, Any]], runs: dict[str, Any]) -> None:
        """Writes the shared settings, and those of single runs."""
        import tomli_w

        self._settings, self._runs = settings, runs
        # With the first seed, the file is all that repeating the comparison needs.
        tables = {**settings, "job": {**settings["job"], "seed": runs["seeds"][0]}, "runs": runs}
        with atomic.writing(self.out), atomic.atomic_file(self.out / SETTINGS) as file:
            file.write_text(tomli_w.dumps(tables), "utf-8")

    def measure(self, say: Callable[[str], object]) -> None:
        """Takes a few steps by each method, and notes how many fit into a run's budget.

        Does nothing without a budget, nor for methods whose steps are known. say: called with
        what is being done. Raises UsageError if the budget is too small, and then removes the
        directory if it holds only settings.
        """
        if self.seconds is None:
            return
        steps, share = self._runs["steps"], self._runs["share"]
        costs = {}
        for name in self.methods:
            if name in steps:
                continue
            say(f"measuring a step of {name}")
            try:
                costs[name] = self._probe(name)
            except RazorError as error:
                self._unmeasured[name] = error
        try:
            steps |= budget.steps_by_method(costs, share, self.seconds / share)
        except UsageError:
            with suppress(OSError):
                if {file.name for file in self.out.iterdir()} == {SETTINGS}:
                    (self.out / SETTINGS).unlink()
                    self.out.rmdir()
            raise
        self._write(self._settings, self._runs)

    def _probe(self, method: str) -> budget.Cost:
        """The cost of a few steps of a method."""
        with TemporaryDirectory(prefix=".probe-", dir=self.out) as folder:
            directory = Path(folder) / method
            length = budget.PROBE, budget.PROBE
            command = self.commands.of_run(method, self.seeds[0], directory, *length)
            run_child(command, lambda: None)
            return budget.probe_cost(directory)

    def run(self, report: Callable[[Progress], object]) -> None:
        """Trains all runs that are not finished: all methods with one seed, then with the next.

        Calls `report` with the progress about every POLL seconds. The error of a failed run is
        written to its directory, and the next run begins. KeyboardInterrupt and Terminated end
        the current run and are raised again.
        """
        cells = list(product(self.seeds, self.methods))
        for number, (seed, name) in enumerate(cells):
            at = Progress(number, len(cells), name, seed)
            try:
                run = self._run(at, report)
                report(replace(at, end=f"{run.figure.replace('_', ' ')} {run.score:.4f}"))
            except RazorError as error:
                note_failure(self._directory(at), error)
                report(replace(at, end=f"failed: {error}"))

    def _run(self, at: Progress, report: Callable[[Progress], object]) -> FinishedRun:
        """Trains the run of one method and seed, or only reads it if it is finished."""
        directory = self._directory(at)
        report(at)
        if not (directory / rundir.RESULT).exists():
            if at.method in self._unmeasured:
                raise self._unmeasured[at.method]
            shutil.rmtree(directory, ignore_errors=True)
            length = self._length(at.method)
            command = self.commands.of_run(at.method, at.seed, directory, *length)
            run_child(command, lambda: report(_look(at, directory)))
        return read_run(directory)

    def _length(self, method: str) -> tuple[int | None, int | None]:
        """The steps of a run, and between its evaluations; None is as the job says."""
        if self.seconds is None:
            return None, None
        steps = self._runs["steps"][method]
        return steps, self.job.evaluate_every or budget.evaluate_every(steps)

    def _directory(self, at: Progress) -> Path:
        return self.out / f"{at.method}-{at.seed}"

    @property
    def comparison(self) -> Comparison:
        """The comparison of the runs so far."""
        return of_grid(self.out, self.methods, self.seeds)

    @property
    def left(self) -> str:
        """A sentence, without its period, on the finished runs of a grid that stops now."""
        done = sum(len(entry.runs) for entry in self.comparison.entries)
        runs = units.count(len(self.seeds) * len(self.methods), "run")
        return f"{self.out} holds {done} of {runs}; go on with --resume --out {self.out}"


def _refuse_other(out: Path, earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises UsageError that names the first setting of the grid in `out` that differs."""
    for table in ("environment", "job", "recipe", "limits"):
        new, old = wanted[table], earlier.get(table, {})
        for name in (*new, *old):
            if name != "seed":
                run_files.refuse_others(out, {name: old.get(name)}, {name: new.get(name)})


def _look(progress: Progress, directory: Path) -> Progress:
    """`progress` with the steps done of the run in a directory."""
    try:
        steps = read_toml(directory / rundir.CONFIG)["job"]["steps"]
        return replace(progress, step=run_files.steps_taken(directory), steps=steps)
    except (UsageError, KeyError, TypeError):  # the run has not written its settings yet
        return progress
