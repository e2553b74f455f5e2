"""A grid of methods and seeds: one run after the other, each in its own process.

A grid's directory holds `comparison.toml` and a run directory for each row and seed, in a folder
for each round if there are several; `variants` says what rows and rounds are. `comparison.toml` has
the shared settings in the layout of a razorctl.toml, the methods, seeds and lists, and with a
budget the steps of each row. The directory of a failed run has a `failure.json`.
`comparison.of_grid` reads all this.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from razorctl import data, units
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from razorctl.errors import RazorError, UsageError
from razorctl.system import atomic
from razorctl.system.folders import exists
from razorctl.training import run_files, rundir
from razorctl.training.comparing import budget
from razorctl.training.comparing.child import run_child
from razorctl.training.comparing.commands import Commands
from razorctl.training.comparing.comparison import (
    FAILURE,
    SETTINGS,
    Comparison,
    is_grid,
    note_failure,
    of_grid,
    recipe_by_name,
    settings_of,
)
from razorctl.training.comparing.finished_run import FinishedRun, read_run
from razorctl.training.comparing.variants import GridRow, Lists, Rounds, rows_of, shares
from razorctl.version import __version__

# Settings that do not change the time of a step.
UNTIMED = frozenset(
    {
        *("learning_rate", "weight_decay", "layer_decay", "momentum", "warmup_steps", "clip_norm"),
        *("label_smoothing", "evaluate_every", "save_every", "patience", "validation"),
    }
)


@dataclass(frozen=True)
class Progress:
    """The progress of a grid.

    run: index of the current run, from 0. runs: their number. method: the label of its row. step,
    steps: steps done and in all in this run; `steps` is None until it is known. end: the run's
    outcome; None until it ends.
    """

    run: int
    runs: int
    method: str
    seed: int
    step: int = 0
    steps: int | None = None
    end: str | None = None


class Grid:
    """Runs of rows and seeds, one after the other, each in its own process.

    With a budget, `measure` settles how many steps each row has; `run` trains.
    """

    def __init__(
        self,
        job: Job,
        methods: Sequence[str],
        *,
        ratio: float = Recipe.ratio,
        lists: Lists | None = None,
        seeds: int = 1,
        seconds: float | None = None,
        device: str | None = None,
        out: Path | None = None,
        resume: bool = False,
    ) -> None:
        """Checks the settings and makes the directory.

        methods: names in NAMES. lists: settings of which each row has one of several values. seeds:
        number of seeds, counted up from the job's. seconds: of training, for all runs together.
        out: the directory to make; with `resume` it may exist, and its finished runs are not run
        again.
        Raises UsageError for settings that no run can use, and for a directory that exists
        without `resume`, belongs to other settings or cannot be written.
        """
        if seeds < 1:
            raise UsageError(f"seeds {seeds} is too few; give 1 or more.")
        self.lists = dict(lists or {})
        length = [n for n in ("steps", "epochs") if getattr(job, n) or n in self.lists]
        if seconds is not None and length:
            what = length[0]
            raise UsageError(f"{what} and a budget cannot both be set; give one of them.")
        self.methods = list(dict.fromkeys(methods))
        if job.cuda_graphs:
            from razorctl.system import devices  # imports torch
            from razorctl.training.compiled import refuse_uncompilable

            refuse_uncompilable(job, Recipe(), devices.find(device))
        # By its absolute path, as in the runs, so that it can be resumed from any directory.
        self.job = replace(job, dataset=data.place(job.dataset))
        self.ratio, self.device, self.seconds = ratio, device, seconds
        self.seeds = range(job.seed, job.seed + seeds)
        self.out = out or rundir.choose(None, "compare", job.model, job.dataset)
        self.rows = rows_of(self.methods, self.lists, lambda name: recipe_by_name(name, ratio))
        self.rounds = Rounds(self.rows, self.lists, seconds is not None)
        self.commands = Commands(self.job, self.rows, ratio, device, self.out / SETTINGS)
        self._unmeasured: dict[GridRow, RazorError] = {}  # rows of which no step could be measured
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
        if self.lists:
            runs["lists"] = {name: list(values) for name, values in self.lists.items()}
        if self.seconds is not None:
            of_rounds = shares(self.rounds, self.seconds, len(self.seeds))
            several = self.rounds.number > 1
            runs |= {"shares": of_rounds} if several else {"share": of_rounds[0]}
            runs["steps"] = {}
        if not self.out.exists():
            with atomic.writing(self.out):
                self.out.mkdir(parents=True)
            with atomic.undoing(self.out.rmdir):
                self._write(settings, runs)
            return
        if not resume:
            raise atomic.taken(self.out, begun=True)
        if not is_grid(self.out):
            raise UsageError(f"{self.out} holds no comparison; name another directory with --out.")
        for place in filter(exists, self._places):
            if not (rundir.is_run(place) or rundir.is_blank(place, FAILURE)):
                raise UsageError(f"{place} holds no run; move it away.")
        earlier = settings_of(self.out)
        _refuse_other(self.out, earlier, settings)
        earlier_runs = earlier.get("runs", {})  # their methods and seeds stay in the grid
        values = (earlier_runs.get("lists") or {}), runs.get("lists", {})
        for name in dict.fromkeys([*values[0], *values[1]]):
            old, new = (each.get(name) for each in values)
            run_files.refuse_others(self.out, {name: old}, {name: new})
        for name in ("methods", "seeds"):
            earlier_runs[name] = list(dict.fromkeys([*earlier_runs.get(name, []), *runs[name]]))
        self._write(settings, runs | earlier_runs)

    def _write(self, settings: Mapping[str, dict[str, Any]], runs: dict[str, Any]) -> None:
        """Writes the shared settings, and those of single runs."""
        import tomli_w

        self._settings, self._runs = settings, runs
        # With the first seed, the file is all that repeating the comparison needs.
        tables = {**settings, "job": {**settings["job"], "seed": runs["seeds"][0]}, "runs": runs}
        with atomic.writing(self.out), atomic.atomic_file(self.out / SETTINGS, True) as file:
            file.write_text(tomli_w.dumps(tables), "utf-8")

    def measure(self, say: Callable[[str], object]) -> None:
        """Takes a few steps by each row, and notes how many fit into a run's share of the budget.

        Rows that differ in UNTIMED settings alone share a measurement. Does nothing without a
        budget, nor for rows whose steps are known. say: called with what is being done. Raises
        UsageError if the budget is too small, and then removes the directory if it holds only
        settings.
        """
        if self.seconds is None:
            return
        steps, of_rounds = self._runs["steps"], self._runs.get("shares") or [self._runs["share"]]
        costs: dict[GridRow, budget.Cost | RazorError] = {}
        for row in self.rows:
            if self.rounds.key(self.rounds.number - 1, row) in steps:
                continue
            timed = replace(row, values=tuple(v for v in row.values if v[0] not in UNTIMED))
            if timed not in costs:
                say(f"measuring a step of {timed.label}")
                costs[timed] = self._probe(row)
            cost = costs[row] = costs[timed]
            if isinstance(cost, RazorError):
                self._unmeasured[row] = cost
        known = {row: costs[row] for row in self.rows if row in costs}
        try:
            for at, share in enumerate(of_rounds):
                keys = {
                    self.rounds.key(at, row): cost
                    for row, cost in known.items()
                    if not isinstance(cost, RazorError)
                }
                steps |= budget.steps_by_method(keys, share, self.seconds / share)
        except UsageError:
            with suppress(OSError):
                if {file.name for file in self.out.iterdir()} == {SETTINGS}:
                    (self.out / SETTINGS).unlink()
                    self.out.rmdir()
            raise
        self._write(self._settings, self._runs)

    def _probe(self, row: GridRow) -> budget.Cost | RazorError:
        """The cost of a few steps of a row, or the error that they end with."""
        with TemporaryDirectory(prefix=".probe-", dir=self.out) as folder:
            directory = Path(folder) / row.name
            length = budget.PROBE, budget.PROBE
            try:
                command = self.commands.of_run(row, self.seeds[0], directory, *length)
                run_child(command, lambda: None)
            except RazorError as error:
                return error
            return budget.probe_cost(directory)

    def run(self, report: Callable[[Progress], object]) -> None:
        """Trains all runs that are not finished: all rows with one seed, then with the next.

        After a round the next one has the better half of the rows of each method.
        Calls `report` with the progress about every POLL seconds. The error of a failed run is
        written to its directory, and the next run begins. KeyboardInterrupt and Terminated end
        the current run and are raised again.
        """
        number = 0
        for turn in self.rounds:
            of_round = (
                f", round {turn + 1} of {self.rounds.number}" if self.rounds.number > 1 else ""
            )
            for seed, row in product(self.seeds, self.rounds.taken(turn, self._score)):
                at = Progress(number, self.runs, row.label + of_round, seed)
                directory = self.rounds.directory(self.out, turn, row, seed)
                try:
                    run = self._run(at, row, turn, directory, report)
                    report(replace(at, end=f"{run.figure.replace('_', ' ')} {run.score:.4f}"))
                except RazorError as error:
                    note_failure(directory, error)
                    report(replace(at, end=f"failed: {error}"))
                number += 1

    def _run(
        self,
        at: Progress,
        row: GridRow,
        turn: int,
        directory: Path,
        report: Callable[[Progress], object],
    ) -> FinishedRun:
        """Trains the run of one row and seed, or only reads it if it is finished."""
        report(at)
        if not (directory / rundir.RESULT).exists():
            if row in self._unmeasured:
                raise self._unmeasured[row]
            shutil.rmtree(directory, ignore_errors=True)
            command = self.commands.of_run(row, at.seed, directory, *self._length(turn, row))
            run_child(command, lambda: report(_look(at, directory)))
        return read_run(directory)

    def _length(self, turn: int, row: GridRow) -> tuple[int | None, int | None]:
        """The steps of a run, and between its evaluations; None is as the job says."""
        if self.seconds is None:
            return None, None
        steps = self._runs["steps"][self.rounds.key(turn, row)]
        every = dict(row.values).get("evaluate_every", self.job.evaluate_every)
        return steps, int(every) if every else budget.evaluate_every(steps)

    def _score(self, turn: int, row: GridRow) -> float | None:
        """The mean over the seeds by which a row is judged after a round; None without a run."""
        scores = []
        for seed in self.seeds:
            with suppress(RazorError):
                directory = self.rounds.directory(self.out, turn, row, seed)
                scores.append(read_run(directory).judged)
        return fmean(scores) if scores else None

    @property
    def runs(self) -> int:
        """The number of runs in all rounds."""
        return len(self.seeds) * sum(map(self.rounds.size, self.rounds))

    @property
    def _places(self) -> Iterator[Path]:
        """The directories of the runs in all rounds."""
        for turn, row, seed in product(self.rounds, self.rows, self.seeds):
            yield self.rounds.directory(self.out, turn, row, seed)

    @property
    def comparison(self) -> Comparison:
        """The comparison of the runs so far."""
        return of_grid(self.out, self.methods, self.seeds)

    @property
    def left(self) -> str:
        """A sentence, without its period, on the finished runs of a grid that stops now."""
        done = sum((place / rundir.RESULT).exists() for place in self._places)
        runs = units.count(self.runs, "run")
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
