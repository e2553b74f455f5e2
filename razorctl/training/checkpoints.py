"""The checkpoints of a run directory: each is valid as a whole, or not at all.

A checkpoint is the directory checkpoints/step-N. It is written under another name, synced and
renamed, and then gets a marker with the size and the checksum of each of its files, and a digest of
itself. A directory without a marker, or with other files than the marker says, is not valid. What
has another name is no checkpoint, and stays. `state` says what is in one; nothing here imports
torch.
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razorctl import documents
from razorctl.errors import UsageError
from razorctl.job import Job
from razorctl.recipe import Recipe
from razorctl.training.atomic import atomic_file, sync
from razorctl.training.run_files import merged_settings, refuse_others, steps_taken
from razorctl.training.rundir import CHECKPOINTS

log = logging.getLogger(__name__)

FORMAT = 1  # of the files in a checkpoint; raised when an older razorctl could not read them
MARKER = "checkpoint.json"
PARTIAL = ".partial"
OWN = re.compile(r"step-(\d{8}|[1-9]\d{8,})(\.partial)?")


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint. marker: what `Checkpoints.save` was given, the format and the files."""

    path: Path
    marker: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps that were taken."""
        return int(self.marker["step"])

    @property
    def score(self) -> float | None:
        """That of the last step; None if it was not evaluated."""
        value: float | None = self.marker["score"]
        return value

    @property
    def intact(self) -> bool:
        """Whether the files are still those that were saved."""
        if self.path.name != f"step-{self.step:08d}":
            return False
        files: Mapping[str, Any] = self.marker["files"]
        try:
            return all(documents.entry(self.path / name) == known for name, known in files.items())
        except OSError:
            return False

    def refuse_others(self, out: Path, job: Job, recipe: Recipe) -> None:
        """Raises UsageError if the run in `out` had other settings than a job and a recipe.

        One whose next step diverged also takes a lower learning rate.
        """
        known, wanted = dict(self.marker["settings"]), merged_settings(job, recipe)
        if self.marker["diverged"] and (job.learning_rate or 0) < known["learning_rate"]:
            del known["learning_rate"]
        refuse_others(out, known, wanted)


class Checkpoints:
    """The valid checkpoints of a run directory, oldest first; the newest and the best are kept.

    The best has the highest score, and is the newest of those. A process that trains in the
    directory holds its lock.
    """

    def __init__(self, out: Path) -> None:
        """Reads what is there; a warning names a newer checkpoint that is not valid.

        Raises UsageError for a checkpoint of another format, and for a folder of them that is a
        link: what lies there is somebody else's.
        """
        self.folder = out / CHECKPOINTS
        self._check_folder()
        paths = _written(out)
        found = {path: _read(path) for path in paths}
        self.valid = [each for each in found.values() if isinstance(each, Checkpoint)]
        newest = self.newest.path if self.newest else None
        for path in paths[paths.index(newest) + 1 if newest else 0 :]:
            where = f"step {self.newest.step:,}" if self.newest else "the beginning"
            why = f" ({found[path]})" if found[path] else ""
            log.warning("%s is incomplete or damaged%s; going on from %s.", path, why, where)

    @property
    def newest(self) -> Checkpoint | None:
        """The one to go on from."""
        return self.valid[-1] if self.valid else None

    @property
    def best(self) -> Checkpoint | None:
        """The newest one of the highest score; None if none was evaluated."""
        evaluated = [checkpoint for checkpoint in self.valid if checkpoint.score is not None]
        return max(evaluated, key=lambda c: (c.score, c.step), default=None)

    @property
    def size(self) -> int:
        """Bytes on disk, also of what is not valid."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def save(self, marker: Mapping[str, Any], write: Callable[[Path], object]) -> None:
        """Saves a newer checkpoint than all others, then removes those that are not kept.

        marker: has a `step` and a `score`. write: makes the files in the directory it is given.
        Raises OSError, and leaves all others as they are, if it cannot be written, and UsageError
        for a folder that is a link.
        """
        final = self.folder / f"step-{marker['step']:08d}"
        partial = final.with_name(final.name + PARTIAL)
        self._check_folder()
        self._sweep()  # of what a killed process left, which may take the space that is needed
        try:
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
            write(partial)
            files = {file.name: documents.entry(file) for file in sorted(partial.iterdir())}
            for name in files:
                sync(partial / name)
            sync(partial)
            _remove(final)  # not a valid one: none is as new
            partial.rename(final)
            sync(self.folder)
            checkpoint = Checkpoint(final, {"format": FORMAT, **marker, "files": files})
            self.mark(checkpoint)
        except BaseException:
            _remove(partial)
            _remove(final)
            raise
        self.valid.append(checkpoint)
        self.valid = [c for c in self.valid if c in (self.best, checkpoint)]
        self._sweep()

    def _check_folder(self) -> None:
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            what = "a link" if self.folder.is_symlink() else "no folder"
            raise UsageError(
                f"{self.folder} is {what}; remove it, or name another directory with --out."
            )

    def mark(self, checkpoint: Checkpoint, **marks: Any) -> None:
        """Writes the marker of a checkpoint, with these entries too."""
        marker = documents.sealed({**checkpoint.marker, **marks})
        with atomic_file(checkpoint.path / MARKER) as file:
            file.write_text(documents.text(marker, indent=2), "utf-8")

    def drop(self, checkpoint: Checkpoint) -> None:
        """Counts a checkpoint as not valid any more."""
        self.valid.remove(checkpoint)

    def _sweep(self) -> None:
        """Removes what a finished save does not need, as far as that is possible."""
        kept = {checkpoint.path for checkpoint in self.valid}
        for path in _own(self.folder):
            if path not in kept:
                _remove(path)


def clear(out: Path) -> None:
    """Removes all checkpoints of a finished run, as far as that is possible."""
    for path in _own(out / CHECKPOINTS):
        _remove(path)
    with suppress(OSError):  # it may have what is no checkpoint
        (out / CHECKPOINTS).rmdir()


def left(out: Path) -> str:
    """What a run that has stopped has saved, as a part of a sentence."""
    taken, marker = steps_taken(out), newest_marker(out)
    if marker is None:
        return f"at step {taken:,}, and no step is saved yet" if taken else "before the first step"
    saved = int(marker["step"])
    total = f"{saved:,} of {marker['settings']['steps']:,}"
    if saved >= taken:
        return f"step {total} is saved"
    return f"at step {taken:,}, and step {total} is saved"


def newest_marker(out: Path) -> Mapping[str, Any] | None:
    """The marker of the newest checkpoint that has one; its files are not read."""
    for path in reversed(_written(out)):
        with suppress(OSError, documents.UnlikeError):
            return _marker(path)
    return None


def _own(folder: Path) -> list[Path]:
    """The directories in a folder that `Checkpoints.save` makes, by their names in order."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if OWN.fullmatch(path.name))
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def _written(out: Path) -> list[Path]:
    """The same in a run directory, without those that are still being written."""
    return [path for path in _own(out / CHECKPOINTS) if path.suffix != PARTIAL]


def _marker(path: Path) -> dict[str, Any]:
    """The marker in a checkpoint's directory.

    Raises OSError, UnlikeError for one of another kind, and UsageError for one of another format.
    """
    from razorctl.training.schemas import Marker  # imported here: few commands need it

    content = documents.contents(path / MARKER)
    marker: dict[str, Any] = documents.parse(content)
    known = marker.get("format") if isinstance(marker, dict) else None
    if isinstance(known, int) and known != FORMAT:
        raise UsageError(
            f"{path} has format {known}, and this razorctl reads {FORMAT}; resume with razorctl "
            f"{marker.get('razorctl')}, or name another directory with --out."
        )
    documents.check(content, Marker)
    return marker


def _read(path: Path) -> Checkpoint | str:
    """The checkpoint in a directory; if it is not valid, what is wrong with its marker, or nothing.

    Raises UsageError for one of another format.
    """
    try:
        checkpoint = Checkpoint(path, _marker(path))
    except OSError:
        return ""
    except documents.UnlikeError as error:
        return f"{MARKER}: {error}"
    return checkpoint if checkpoint.intact else ""


def _remove(path: Path) -> None:
    """Removes a checkpoint, as far as that is possible; its marker goes first."""
    with suppress(OSError):
        (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
