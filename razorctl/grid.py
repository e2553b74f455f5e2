"""Methods x seeds, one run after the other, each in a process of its own.

A grid's directory holds `comparison.toml`, the settings that all runs share in the layout of a
razorctl.toml, and a run directory for each method and seed.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import razorctl
from razorctl import search
from razorctl.comparison import Comparison, Entry, FinishedRun, read
from razorctl.errors import RazorError, Terminated, UsageError
from razorctl.job import Job
from razorctl.recipe import METHODS, Recipe
from razorctl.registry import unknown
from razorctl.settings import read_toml
from razorctl.traces import Cache, Trace

# What a method is compared with beside the methods themselves, and the attention it is run with.
OPPONENTS = {"full-stored": "stored", "full-flash": "flash", "accumulate": "auto"}
NAMES = (*METHODS, *OPPONENTS)
SETTINGS = "comparison.toml"
POLL = 0.25  # seconds between two looks at a run
KILLED = -getattr(signal, "SIGKILL", 9)


@dataclass(frozen=True)
class Progress:
    """Where a grid stands. run: of runs, from 0; steps: of the run, None until that is known."""

    run: int
    runs: int
    method: str
    seed: int
    step: int = 0
    steps: int | None = None


class Grid:
    """Methods x seeds, one run after the other, each in a process of its own.

    Made, it has checked all that can be checked and has its directory; `run` fills `entries`.
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
        job.resolved(self.facts["defaults"], self.facts["train_examples"])
        self.entries = {name: Entry(name, name, self._recipe(name)) for name in self.methods}
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        self.out = out or Path("runs") / f"compare-{job.model}-{job.dataset}-{stamp}"
        self._prepare(resume)

    def _recipe(self, name: str) -> Recipe:
        method = name if name in METHODS else "full"
        return Recipe(method, self.ratio, attention=OPPONENTS.get(name, "auto"))  # type: ignore[arg-type]

    def _prepare(self, resume: bool) -> None:
        """Makes the directory, or sees that it is of these settings."""
        import tomli_w

        job = {k: v for k, v in asdict(self.job).items() if v is not None and k != "seed"}
        environment = {"razorctl": razorctl.__version__, "device": self.device}
        settings = {
            "job": job,
            "recipe": {"ratio": self.ratio},
            "environment": {k: v for k, v in environment.items() if v is not None},
        }
        if not self.out.exists():
            try:
                self.out.mkdir(parents=True)
                (self.out / SETTINGS).write_text(tomli_w.dumps(settings), "utf-8")
            except OSError as error:
                raise UsageError(
                    f"cannot write {self.out} ({error.strerror}); "
                    "name another directory with --out."
                ) from None
        elif not resume:
            raise UsageError(
                f"{self.out} exists already; go on there with --resume, or name another directory "
                "with --out."
            )
        elif not (self.out / SETTINGS).exists():
            raise UsageError(f"{self.out} holds no comparison; name another directory with --out.")
        elif known := _difference(read_toml(self.out / SETTINGS), settings):
            raise UsageError(
                f"{self.out} was begun with {known}; resume it so, or name another directory with "
                "--out."
            )

    def run(self, report: Callable[[Progress], object]) -> None:
        """Runs what is not finished yet, every method with a seed before the next seed.

        Tells `report` where it stands, again and again. A run that fails is noted as such and the
        next one begins; when interrupted or terminated, ends the run that is on.
        """
        cells = list(product(self.seeds, self.methods))
        for number, (seed, name) in enumerate(cells):
            entry = self.entries[name]
            try:
                entry.runs.append(self._run(Progress(number, len(cells), name, seed), report))
            except RazorError as error:
                entry.failures[seed] = error

    def _run(self, at: Progress, report: Callable[[Progress], object]) -> FinishedRun:
        """The run of one method and seed, from its directory if it is finished there."""
        directory = self.out / f"{at.method}-{at.seed}"
        report(at)
        if not (directory / "result.json").exists():
            shutil.rmtree(directory, ignore_errors=True)
            _call(self._command(at, directory), lambda: report(_look(at, directory)))
        return read(directory)

    @property
    def comparison(self) -> Comparison:
        """Of what has been run so far."""
        return Comparison(self.job.model, self.job.dataset, list(self.entries.values()))

    @property
    def exit_code(self) -> int:
        """0 if any run has a result, else what all runs ended with, or 1."""
        if any(entry.runs for entry in self.entries.values()):
            return 0
        codes = {e.exit_code for entry in self.entries.values() for e in entry.failures.values()}
        return codes.pop() if len(codes) == 1 else 1

    def _command(self, at: Progress, directory: Path) -> list[str]:
        """What a user would type for one run."""
        recipe = self.entries[at.method].recipe
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
        batch = self._resolved().batch_size
        assert batch is not None
        most = self._peak(self.job.accumulate, "razor")
        for count in range(self.job.accumulate, batch + 1):
            if batch % count == 0 and self._peak(count, "full") <= most:
                return count
        raise UsageError(
            f"accumulating over {batch} micro-batches still takes more than razor; "
            "leave accumulate out."
        )

    def _resolved(self) -> Job:
        from razorctl import devices, step  # import torch

        precision = step.precision(self.job, devices.find(self.device))
        job = replace(self.job, precision=precision)
        return job.resolved(self.facts["defaults"], self.facts["train_examples"])

    def _peak(self, accumulate: int, method: str) -> int:
        return self._trace(accumulate, method).on(self._kind)

    def _trace(self, accumulate: int, method: str) -> Trace:
        job, recipe = replace(self._resolved(), accumulate=accumulate), self._recipe(method)
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


@contextmanager
def _sigterm_waits() -> Iterator[Callable[[], None]]:
    """Holds back a SIGTERM that would end this process alone and let its child go on.

    What it yields raises Terminated if one has come, and so does leaving.
    """
    came: list[int] = []

    def check() -> None:
        if came:
            raise Terminated(128 + signal.SIGTERM)

    # Only the main thread may set a handler, and one that is not the default is somebody's own.
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield check
        return
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    check()


def _call(command: list[str], wait: Callable[[], object]) -> None:
    """Runs a command to its end, and calls `wait` meanwhile.

    Raises RazorError if it fails, with its sentence and its exit code, and Terminated at a SIGTERM.
    """
    # All settings are in the command: none may come from the environment as well.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAZORCTL_", "FORCE_"))}
    with (
        _sigterm_waits() as check,
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
        steps = read_toml(directory / "config.toml")["job"]["steps"]
        with (directory / "metrics.jsonl").open("rb") as lines:
            return replace(progress, step=sum(1 for _ in lines), steps=steps)
    except (OSError, UsageError, KeyError):  # not there yet
        return progress
