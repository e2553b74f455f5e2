"""Methods x seeds, one run after the other, each in a process of its own.

A grid's directory holds `comparison.toml`, the settings that all runs share in the layout of a
razorctl.toml beside their methods and seeds, and a run directory for each of these, with
`failure.json` where the run failed. `comparison.of_grid` reads it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import razorctl
from razorctl.config.registry import unknown
from razorctl.config.settings import read_toml
from razorctl.errors import RazorError, UsageError
from razorctl.job import Job
from razorctl.memory.trace_cache import Cache, Trace
from razorctl.planning import search
from razorctl.recipe import Recipe
from razorctl.training import rundir
from razorctl.training.comparison import (
    NAMES,
    SETTINGS,
    Comparison,
    FinishedRun,
    note_failure,
    of_grid,
    read,
    recipe_of,
)
from razorctl.training.signals import sigterm_waits

POLL = 0.25  # seconds between two looks at a run
KILLED = -getattr(signal, "SIGKILL", 9)


@dataclass(frozen=True)
class Progress:
    """Where a grid stands.

    run: of runs, from 0. steps: of the run, None until that is known. end: how it has ended.
    """

    run: int
    runs: int
    method: str
    seed: int
    step: int = 0
    steps: int | None = None
    end: str | None = None


class Grid:
    """Methods x seeds, one run after the other, each in a process of its own.

    Made, it has checked all that can be checked and has its directory; `run` fills that.
    """

    def __init__(
        self,
        job: Job,
        methods: Sequence[str],
        *,
        ratio: float = Recipe.ratio,
        seeds: int = 1,
        device: str | None = None,
        out: Path | None = None,
        resume: bool = False,
    ) -> None:
        """Raises UsageError for settings that no run could have, and for a directory in the way.

        methods: names in NAMES. seeds: how many, counted up from the job's. out: made here; with
        `resume` it may exist, and what is finished there is kept.
        """
        if seeds < 1:
            raise UsageError(f"{seeds} seeds are no comparison; give 1 or more.")
        self.methods = list(dict.fromkeys(methods))
        for name in self.methods:
            if name not in NAMES:
                raise unknown("method", name, NAMES)
        self.job, self.ratio, self.device = job, ratio, device
        self.seeds = range(job.seed, job.seed + seeds)
        self.cache = Cache()
        self.facts = search.facts(job, self.cache)
        self.resolved = job.resolved(self.facts["defaults"], self.facts["train_examples"])
        self.recipes = {name: recipe_of(name, ratio) for name in self.methods}
        self.out = out or rundir.choose(None, "compare", job.model, job.dataset)
        self._prepare(resume)

    def _prepare(self, resume: bool) -> None:
        """Makes the directory, or sees that it is of these settings."""
        job = {k: v for k, v in asdict(self.job).items() if v is not None and k != "seed"}
        environment = {"razorctl": razorctl.__version__, "device": self.device}
        settings = {
            "job": job,
            "recipe": {"ratio": self.ratio},
            "environment": {k: v for k, v in environment.items() if v is not None},
        }
        runs: dict[str, list[Any]] = {"methods": self.methods, "seeds": list(self.seeds)}
        if not self.out.exists():
            try:
                self.out.mkdir(parents=True)
                self._write(settings | {"runs": runs})
            except OSError as error:
                raise UsageError(
                    f"cannot write {self.out} ({error.strerror}); "
                    "name another directory with --out."
                ) from None
            return
        if not resume:
            raise UsageError(
                f"{self.out} exists already; go on there with --resume, or name another directory "
                "with --out."
            )
        if not (self.out / SETTINGS).exists():
            raise UsageError(f"{self.out} holds no comparison; name another directory with --out.")
        known = read_toml(self.out / SETTINGS)
        if other := _difference(known, settings):
            raise UsageError(
                f"{self.out} was begun with {other}; resume it so, or name another directory with "
                "--out."
            )
        before = known.get("runs", {})  # which stay
        for name, values in runs.items():
            runs[name] = list(dict.fromkeys([*before.get(name, []), *values]))
        self._write(settings | {"runs": runs})

    def _write(self, settings: Mapping[str, Any]) -> None:
        import tomli_w

        with rundir.whole(self.out / SETTINGS) as file:
            file.write_text(tomli_w.dumps(settings), "utf-8")

    def run(self, report: Callable[[Progress], object]) -> None:
        """Runs what is not finished yet, every method with a seed before the next seed.

        Tells `report` where it stands, again and again. A run that fails is noted as such and the
        next one begins; when interrupted or terminated, ends the run that is on.
        """
        cells = list(product(self.seeds, self.methods))
        for number, (seed, name) in enumerate(cells):
            at = Progress(number, len(cells), name, seed)
            try:
                accuracy = self._run(at, report).result["accuracy"]
                report(replace(at, end=f"accuracy {accuracy:.4f}"))
            except RazorError as error:
                note_failure(self._directory(at), error)
                report(replace(at, end=f"failed: {error}"))

    def _run(self, at: Progress, report: Callable[[Progress], object]) -> FinishedRun:
        """The run of one method and seed, from its directory if it is finished there."""
        directory = self._directory(at)
        report(at)
        if not (directory / rundir.RESULT).exists():
            shutil.rmtree(directory, ignore_errors=True)
            _call(self._command(at, directory), lambda: report(_look(at, directory)))
        return read(directory)

    def _directory(self, at: Progress) -> Path:
        return self.out / f"{at.method}-{at.seed}"

    @property
    def comparison(self) -> Comparison:
        """Of what has been run so far."""
        return of_grid(self.out, self.methods, self.seeds)

    @property
    def left(self) -> str:
        """What it leaves if it stops now, as a sentence without its full stop."""
        done = sum(len(entry.runs) for entry in self.comparison.entries)
        runs = len(self.seeds) * len(self.methods)
        return f"{self.out} holds {done} of {runs} runs; go on with --resume --out {self.out}"

    def _command(self, at: Progress, directory: Path) -> list[str]:
        """What a user would type for one run."""
        recipe = self.recipes[at.method]
        words = [sys.executable, "-m", "razorctl", "--config", str(self.out / SETTINGS), "finetune"]
        words += [
            "--method",
            recipe.method,
            "--attention",
            recipe.attention,
            "--seed",
            str(at.seed),
        ]
        if at.method == "accumulate":
            words += ["--accumulate", str(self._micro_batches())]
        if at.method == "full-flash" and self._trace(self.job.accumulate, "full").fused:
            raise UsageError(
                f"{self.job.model} runs fused attention as it comes, as `full` does; "
                "leave full-flash out."
            )
        if self.device is not None:
            words += ["--device", self.device]
        return [*words, "--json", "--out", str(directory)]

    def _micro_batches(self) -> int:
        """As few of `full` as bring its traced peak to at most razor's."""
        batch = self._settled().batch_size
        assert batch is not None
        most = self._peak(self.job.accumulate, "razor")
        for count in range(self.job.accumulate, batch + 1):
            if batch % count == 0 and self._peak(count, "full") <= most:
                return count
        raise UsageError(
            f"accumulating over {batch} micro-batches still takes more than razor; "
            "leave accumulate out."
        )

    def _settled(self) -> Job:
        from razorctl import devices, step  # import torch

        precision = step.precision(self.job, devices.find(self.device))
        return replace(self.resolved, precision=precision)

    def _peak(self, accumulate: int, method: str) -> int:
        return self._trace(accumulate, method).on(self._kind)

    def _trace(self, accumulate: int, method: str) -> Trace:
        job, recipe = (
            replace(self._settled(), accumulate=accumulate),
            recipe_of(method, self.ratio),
        )
        return search.traced(job, recipe, self.facts["classes"], self.cache, self._kind)

    @property
    def _kind(self) -> str:
        from razorctl import devices

        return devices.find(self.device).type


def _difference(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first setting that is another than the wanted one, as it is known."""
    for table in ("environment", "job", "recipe"):
        ours, theirs = wanted[table], known.get(table, {})
        for name in (*ours, *theirs):
            if ours.get(name) != theirs.get(name):
                value = theirs.get(name)
                return f"{name.replace('_', ' ')} {'left out' if value is None else value}"
    return None


def _call(command: list[str], wait: Callable[[], object]) -> None:
    """Runs a command to its end, and calls `wait` meanwhile.

    Raises RazorError if it fails, with its sentence and its exit code, and Terminated at a SIGTERM.
    """
    # All settings are in the command: none may come from the environment as well.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAZORCTL_", "FORCE_"))}
    with (
        sigterm_waits() as check,
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
                wait()
        except BaseException:
            process.kill()
            process.wait()  # after a KeyboardInterrupt Popen would not
            raise
    code = process.returncode
    if code == 0:
        return
    sentences = [line for line in messages.splitlines() if line.startswith("error: ")]
    if sentences:
        sentence = sentences[-1].removeprefix("error: ")
    elif code == KILLED:
        sentence, code = "it was killed, as when memory runs out; lower --batch-size.", 4
    else:
        sentence = f"it ended with {code} and no word; run it by hand: {shlex.join(command)}"
    failure = RazorError(sentence)
    failure.exit_code = code if code > 0 else 1
    raise failure


def _look(progress: Progress, directory: Path) -> Progress:
    """How far the run in a directory is."""
    try:
        steps = read_toml(directory / rundir.CONFIG)["job"]["steps"]
        return replace(progress, step=rundir.steps(directory), steps=steps)
    except (UsageError, KeyError):  # not there yet
        return progress
