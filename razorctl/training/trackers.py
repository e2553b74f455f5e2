"""Experiment trackers of runs, by the classes of accelerate."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from razorctl.errors import UsageError, reason_of
from razorctl.registry import unknown
from razorctl.system import atomic, documents
from razorctl.training import run_files

if TYPE_CHECKING:
    from razorctl.training.metrics import Step
    from razorctl.training.run import Run

log = logging.getLogger(__name__)

# Name -> the class in accelerate.tracking.
TRACKERS = {
    "tensorboard": "TensorBoardTracker",
    "trackio": "TrackioTracker",
    "wandb": "WandBTracker",
}
FILE = "trackers.json"  # in a run directory: the names of its trackers, and the run's id in them
OF_TRAINING = ("loss", "learning_rate", "grad_norm", "samples_per_second", "epoch")


def check_trackers(names: Sequence[str], out: Path | None = None) -> tuple[str, ...]:
    """The trackers of a run: `names`, else the trackers of the run in the directory `out`.

    Loads none of them. Raises UsageError for an unknown tracker and a missing package.
    """
    chosen = tuple(dict.fromkeys(part.strip() for name in names for part in name.split(",")))
    if not chosen and out is not None:
        chosen = tuple(_read(out).get("names", ()))
    for name in chosen:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    packages = ("accelerate", *chosen) if chosen else ()
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UsageError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; run "
            f"`pip install {' '.join(missing)}`, or leave --tracker out."
        )
    return chosen


def tracked(run: "Run", names: Sequence[str]) -> Iterator["Step"]:
    """Trains a run and yields its steps, after it has sent each to the trackers.

    A tracker that is new to the run also gets its earlier steps. A tracker that fails during
    training gives a warning and gets no more steps. Raises UsageError for one that cannot start.

    names: the result of `check_trackers`.
    """
    if not names:
        yield from run
        return
    document = _read(run.out)
    identity, before = document.get("id") or uuid4().hex[:12], document.get("names", [])
    trackers: list[_Open] = []
    try:
        for name in names:
            trackers.append(_Open(name, run, identity, new=name not in before))
        with atomic.writing(run.out), atomic.atomic_file(run.out / FILE, True) as file:
            every = [*dict.fromkeys([*before, *names])]
            file.write_text(documents.text({"names": every, "id": identity}) + "\n")
        for step in run:
            for tracker in trackers:
                tracker.log(step.step, _values(run, step))
            yield step
        if run.tested is not None:
            for tracker in trackers:
                tracker.log(len(run.history), _named("test", run.tested))
    finally:
        for tracker in trackers:
            tracker.finish()


def _read(out: Path) -> dict[str, Any]:
    from razorctl.training.schemas import Trackers

    return run_files.read_document(out / FILE, Trackers) or {}


def _values(run: "Run", step: "Step") -> dict[str, float]:
    """The values of a step: name of a chart -> value."""
    values = _named("train", {name: getattr(step, name) for name in OF_TRAINING})
    if run.peak_bytes is not None:
        values["train/peak_bytes"] = run.peak_bytes
    return values | _named(run.feed.split, step.metrics or {})


def _named(group: str, values: Any) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items() if value is not None}


class _Open:
    """A started tracker of accelerate."""

    def __init__(self, name: str, run: "Run", identity: str, new: bool) -> None:
        from accelerate import PartialState, tracking

        PartialState()  # accelerate's loggers need it
        kind = getattr(tracking, TRACKERS[name])
        self.name, self.works = name, True
        try:
            with redirect_stdout(sys.stderr):  # stdout is for the result
                # TensorBoard writes into a folder of the run; the others have a project.
                place = (name, str(run.out)) if name == "tensorboard" else ("razorctl",)
                self.tracker = kind(*place, **_settings(name, run, identity, new))
                self.tracker.main_process_only = False
                self.tracker.start()
                if new:
                    settings = run_files.merged_settings(run.job, run.recipe)
                    settings = {k: v for k, v in settings.items() if v is not None}
                    self.tracker.store_init_configuration({**settings, "run_dir": str(run.out)})
        except Exception as error:  # each library has other classes
            raise UsageError(
                f"{name} cannot be started ({reason_of(error)}); correct that, or leave it out, "
                f"and continue with `{run.command}`."
            ) from error
        if new:
            for step in run.history:
                self.log(step.step, _values(run, step))

    def log(self, step: int, values: dict[str, float]) -> None:
        self._call("log", values, step=step)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, verb: str, *args: Any, **settings: Any) -> None:
        """Calls the tracker if it works; its errors do not end the training."""
        if not self.works:
            return
        try:
            with redirect_stdout(sys.stderr):
                getattr(self.tracker, verb)(*args, **settings)
        except Exception as error:  # each library has other classes
            self.works = False
            log.warning("%s fails (%s); training continues without.", self.name, reason_of(error))


def _settings(name: str, run: "Run", identity: str, new: bool) -> dict[str, Any]:
    """Arguments of the library's constructor, with which a resumed run continues its charts."""
    if name == "tensorboard":
        # Hides steps after the checkpoint that the run resumes from.
        return {} if new else {"purge_step": len(run.history) + 1}
    if name == "wandb":
        return {"name": run.out.name, "id": identity, "resume": "allow", "dir": str(run.out)}
    return {"name": f"{run.out.name}-{identity}", "resume": "allow"}
