"""A grid of methods and seeds: one run after the other, each in its own process.

The directory of a grid has `comparison.toml` and a run directory for each row (see `variants`) and
seed. `comparison.toml` has the shared settings, as in a razorctl.toml, and the methods, seeds and
lists. A failed run has a `failure.json`. `comparison.of_grid` reads these files.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from razorctl import data, units
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from razorctl.errors import RazorError, UsageError
from razorctl.ops import kernels
from razorctl.system import atomic
from razorctl.system.folders import exists
from razorctl.training import run_files, rundir
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
from razorctl.training.comparing.variants import GridRow, Lists, rows_of
from razorctl.training.signals import termination_waits
from razorctl.version import __version__

POLL = 0.25  # seconds between two reports
GOING_ON = re.compile(r", such as with `[^`]* --resume [^`]*`")
KILLED = -getattr(signal, "SIGKILL", 9)


@dataclass(frozen=True)
class Progress:
    """The progress of a grid.

    run: index of the current run, from 0. runs: the number of runs. method: the label of its row.
    step: steps done. steps: all steps of the run; None until they are known. end: the result of the
    run in words; None until it ends.
    """

    run: int
    runs: int
    method: str
    seed: int
    step: int = 0
    steps: int | None = None
    end: str | None = None


class Grid:
    """Runs of rows and seeds, one after the other, each in its own process."""

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

        methods: names in NAMES. lists: setting -> values, of which a row has one each. seeds: the
        number of seeds, counted from the job's. seconds: time after which no new run starts. out:
        the new directory; with `resume` it may exist, and its finished runs are not repeated.
        Raises UsageError for settings that no run can use, and for a directory that exists without
        `resume`, belongs to other settings or cannot be written.
        """
        if seeds < 1:
            raise UsageError(f"seeds {seeds} is too few; give 1 or more.")
        self.lists = dict(lists or {})
        self.methods = list(dict.fromkeys(methods))
        if job.cuda_graphs:
            from razorctl.training.compiled import refuse_uncompilable  # imports torch

            refuse_uncompilable(job, Recipe())
        # An absolute path, so that the grid can be resumed from any directory.
        self.job = replace(job, dataset=data.place(job.dataset))
        self.ratio, self.device, self.seconds = ratio, device, seconds
        self.seeds = range(job.seed, job.seed + seeds)
        self.out = out or rundir.choose(None, "compare", job.model, job.dataset)
        self.rows = rows_of(self.methods, self.lists, lambda name: recipe_by_name(name, ratio))
        self.commands = Commands(self.job, self.rows, ratio, device, self.out / SETTINGS)
        self._prepare(resume)

    def _prepare(self, resume: bool) -> None:
        """Makes the directory; with `resume`, checks that an existing one has these settings."""
        job = {k: v for k, v in asdict(self.job).items() if v is not None and k != "seed"}
        environment = {"razorctl": __version__, "device": self.device}
        settings = {
            "job": job,
            "recipe": {"ratio": self.ratio},
            "environment": {k: v for k, v in environment.items() if v is not None},
        }
        runs: dict[str, Any] = {"methods": self.methods, "seeds": list(self.seeds)}
        if self.lists:
            runs["lists"] = {name: list(values) for name, values in self.lists.items()}
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
        for directory in filter(exists, self._directories):
            if not (rundir.is_run(directory) or rundir.is_blank(directory, FAILURE)):
                raise UsageError(f"{directory} holds no run; move it away.")
        earlier = settings_of(self.out)
        of_runs = earlier["runs"]  # its methods and seeds stay in the grid
        for table in ("environment", "job", "recipe"):
            self._refuse_others(earlier.get(table, {}), settings[table])
        self._refuse_others(of_runs.get("lists") or {}, runs.get("lists", {}))
        for name in ("methods", "seeds"):
            of_runs[name] = list(dict.fromkeys([*of_runs[name], *runs[name]]))
        self._write(settings, runs | of_runs)

    def _refuse_others(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Raises UsageError that names the first setting of the grid that differs."""
        for name in (*new, *old):
            if name != "seed":
                run_files.refuse_others(self.out, {name: old.get(name)}, {name: new.get(name)})

    def _write(self, settings: Mapping[str, dict[str, Any]], runs: dict[str, Any]) -> None:
        """Writes the shared settings and the table of the runs."""
        import tomli_w

        # The first seed is in the job, so that --config of this file repeats the comparison.
        tables = {**settings, "job": {**settings["job"], "seed": runs["seeds"][0]}, "runs": runs}
        with atomic.writing(self.out), atomic.atomic_file(self.out / SETTINGS, True) as file:
            file.write_text(tomli_w.dumps(tables), "utf-8")

    def run(self, report: Callable[[Progress], object]) -> bool:
        """Trains the runs that are not finished: all rows with one seed, then with the next.

        Returns whether the time was up before all had begun. Calls `report` about every POLL
        seconds. The error of a failed run is written to its directory, and the next run begins.
        KeyboardInterrupt and Terminated end the current run and are raised again.
        """
        begun = time.monotonic()
        for number, (seed, row) in enumerate(product(self.seeds, self.rows)):
            directory = self._directory(row, seed)
            late = self.seconds is not None and time.monotonic() - begun >= self.seconds
            if late and not (directory / rundir.RESULT).exists():
                return True
            at = Progress(number, self.runs, row.label, seed)
            try:
                run = self._run(at, row, directory, report)
                report(replace(at, end=f"{run.figure.replace('_', ' ')} {run.score:.4f}"))
            except RazorError as error:
                note_failure(directory, error)
                report(replace(at, end=f"failed: {error}"))
        return False

    def _run(
        self, at: Progress, row: GridRow, directory: Path, report: Callable[[Progress], object]
    ) -> FinishedRun:
        """Trains the run of a row and a seed, and reads it; a finished run is only read."""
        report(at)
        if not (directory / rundir.RESULT).exists():
            shutil.rmtree(directory, ignore_errors=True)
            command = self.commands.of_run(row, at.seed, directory)
            run_child(command, lambda: report(_look(at, directory)))
        return read_run(directory)

    def _directory(self, row: GridRow, seed: int) -> Path:
        """The directory of a run."""
        return self.out / f"{row.name}-{seed}"

    @property
    def runs(self) -> int:
        """The number of runs."""
        return len(self.seeds) * len(self.rows)

    @property
    def _directories(self) -> Iterator[Path]:
        """The directories of the runs."""
        for seed, row in product(self.seeds, self.rows):
            yield self._directory(row, seed)

    @property
    def comparison(self) -> Comparison:
        """The comparison of the runs so far."""
        return of_grid(self.out, self.methods, self.seeds)

    @property
    def left(self) -> str:
        """How many runs a grid has finished, and how to go on; a sentence without its period."""
        done = sum((directory / rundir.RESULT).exists() for directory in self._directories)
        runs = units.count(self.runs, "run")
        return f"{self.out} holds {done} of {runs}; continue with --resume --out {self.out}"


def _look(progress: Progress, directory: Path) -> Progress:
    """`progress` with the steps of the run in a directory."""
    try:
        steps = read_toml(directory / rundir.CONFIG)["job"]["steps"]
        return replace(progress, step=run_files.steps_taken(directory), steps=steps)
    except (UsageError, KeyError, TypeError):  # the run has not written its settings yet
        return progress


def run_child(command: list[str], report: Callable[[], object]) -> None:
    """Runs a command to its end, and calls `report` every POLL seconds.

    Raises RazorError with the error and the exit code of a failed command, and Terminated after a
    SIGTERM.
    """
    # The command line has all settings; variables must not override them.
    settings = {k for k in os.environ if k.startswith(("RAZORCTL_", "FORCE_"))} - {kernels.SETTING}
    environment = {k: v for k, v in os.environ.items() if k not in settings}
    with (
        termination_waits() as check,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    _, messages = process.communicate(timeout=POLL)
                    break
                check()
                report()
        except BaseException:
            process.kill()
            process.wait()  # after a KeyboardInterrupt, Popen would not wait
            raise
    if process.returncode:
        raise _failure(command, process.returncode, messages)


def _failure(command: list[str], code: int, messages: str) -> RazorError:
    """The error of a command; messages: its stderr."""
    sentences = [line for line in messages.splitlines() if line.startswith("error: ")]
    if sentences:
        # A grid repeats a failed run, so the command that continues it is left out.
        sentence = GOING_ON.sub("", sentences[-1].removeprefix("error: "))
    elif code == KILLED:
        sentence, code = "the run was killed, likely out of memory; lower --batch-size.", 4
    else:
        sentence = f"the run ended with code {code} and no error; run `{shlex.join(command)}`."
    failure = RazorError(sentence)
    failure.exit_code = code if code > 0 else 1
    return failure
