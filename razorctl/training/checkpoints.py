"""The checkpoints of a run directory: each is valid as a whole, or not at all.

A checkpoint is the directory checkpoints/step-N. It is written under another name, synced and
renamed, and then gets a marker with the size and checksum of each of its files, and a digest of
itself. A directory without a marker, or with other files than the marker's, is not valid.
Directories of other names are left alone. `state` has the content of a checkpoint. Imports no
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

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.system import documents
from razorctl.system.atomic import atomic_file, sync
from razorctl.training.run_files import merged_settings, refuse_others, steps_taken
from razorctl.training.rundir import CHECKPOINTS

log = logging.getLogger(__name__)

FORMAT = 1  # of the files in a checkpoint; raised with a change that older versions cannot read
MARKER = "checkpoint.json"
PARTIAL = ".partial"
NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})(\.partial)?")


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint; marker: as for `Checkpoints.save`, with the format and the files."""

    path: Path
    marker: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps before the checkpoint."""
        return int(self.marker["step"])

    @property
    def score(self) -> float | None:
        """The score of the last step; None if it was not evaluated."""
        value: float | None = self.marker["score"]
        return value

    @property
    def intact(self) -> bool:
        """Whether the files have the sizes and checksums of the marker."""
        if self.path.name != f"step-{self.step:08d}":
            return False
        files: Mapping[str, Any] = self.marker["files"]
        try:
            return all(
                documents.size_and_checksum(self.path / name) == entry
                for name, entry in files.items()
            )
        except OSError:
            return False

    def refuse_others(self, out: Path, job: Job, recipe: Recipe) -> None:
        """Raises UsageError if a job and a recipe differ from the settings of the run in `out`.

        A run that diverged may be resumed with a lower learning rate.
        """
        settings, wanted = dict(self.marker["settings"]), merged_settings(job, recipe)
        if self.marker["diverged"] and (job.learning_rate or 0) < settings["learning_rate"]:
            del settings["learning_rate"]
        refuse_others(out, settings, wanted)


class Checkpoints:
    """The valid checkpoints of a run directory, oldest first; only the newest and the best stay.

    The best has the highest score; of several, it is the newest. The caller holds the lock of the
    directory.
    """

    def __init__(self, out: Path) -> None:
        """Reads the valid checkpoints; warnings name newer ones that are not valid.

        Raises UsageError for a checkpoint of another format, and for a folder that is a link, since
        files in its target may be foreign.
        """
        self.folder = out / CHECKPOINTS
        self._check_folder()
        paths = _renamed(out)
        results = {path: _read(path) for path in paths}
        self.valid = [each for each in results.values() if isinstance(each, Checkpoint)]
        first_newer = paths.index(self.newest.path) + 1 if self.newest else 0
        for path in paths[first_newer:]:
            where = f"step {self.newest.step:,}" if self.newest else "the beginning"
            why = f" ({results[path]})" if results[path] else ""
            log.warning("%s is incomplete or damaged%s; continuing from %s.", path, why, where)

    @property
    def newest(self) -> Checkpoint | None:
        """The checkpoint to resume from."""
        return self.valid[-1] if self.valid else None

    @property
    def best(self) -> Checkpoint | None:
        """The newest checkpoint of the highest score; None if none was evaluated."""
        evaluated = [checkpoint for checkpoint in self.valid if checkpoint.score is not None]
        return max(evaluated, key=lambda c: (c.score, c.step), default=None)

    @property
    def size(self) -> int:
        """Bytes on disk, of invalid checkpoints too."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def save(self, marker: Mapping[str, Any], write: Callable[[Path], object]) -> None:
        """Writes a checkpoint of a later step, then removes all but this one and the best.

        marker: has a `step` and a `score`. write: makes the files in a directory.
        Raises OSError, and changes no other checkpoint, if it cannot be written, and UsageError if
        the folder is a link.
        """
        final = self.folder / f"step-{marker['step']:08d}"
        partial = final.with_name(final.name + PARTIAL)
        self._check_folder()
        self._sweep()  # files of a killed process take space
        try:
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
            write(partial)
            files = {
                file.name: documents.size_and_checksum(file) for file in sorted(partial.iterdir())
            }
            for name in files:
                sync(partial / name)
            sync(partial)
            _remove(final)  # an invalid one
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
        """Writes the marker of a checkpoint, with `marks` added."""
        marker = documents.sealed({**checkpoint.marker, **marks})
        with atomic_file(checkpoint.path / MARKER, replace=True) as file:
            file.write_text(documents.text(marker, indent=2), "utf-8")

    def _sweep(self) -> None:
        """Removes all other checkpoints, as far as possible."""
        valid = {checkpoint.path for checkpoint in self.valid}
        for path in _directories(self.folder):
            if path not in valid:
                _remove(path)


def clear(out: Path) -> None:
    """Removes all checkpoints of a finished run, as far as possible."""
    for path in _directories(out / CHECKPOINTS):
        _remove(path)
    with suppress(OSError):  # it may hold other files
        (out / CHECKPOINTS).rmdir()


def left(out: Path) -> str:
    """How many steps of a stopped run are taken and saved, as a part of a sentence."""
    taken, marker = steps_taken(out), newest_marker(out)
    if marker is None:
        return f"at step {taken:,}, and no step is saved yet" if taken else "before the first step"
    saved = int(marker["step"])
    total = f"{saved:,} of {marker['settings']['steps']:,}"
    if saved >= taken:
        return f"step {total} is saved"
    return f"at step {taken:,}, and step {total} is saved"


def newest_marker(out: Path) -> Mapping[str, Any] | None:
    """The marker of the newest checkpoint with one; other files are not read."""
    for path in reversed(_renamed(out)):
        with suppress(OSError, documents.UnlikeError):
            return _marker(path)
    return None


def _directories(folder: Path) -> list[Path]:
    """The directories in a folder that `Checkpoints.save` makes, sorted by name."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if NAME.fullmatch(path.name))
    return sorted(path for path in paths if path.is_dir() and not path.is_symlink())


def _renamed(out: Path) -> list[Path]:
    """The checkpoints in a run directory, without unfinished ones."""
    return [path for path in _directories(out / CHECKPOINTS) if path.suffix != PARTIAL]


def _marker(path: Path) -> dict[str, Any]:
    """The marker in a checkpoint's directory.

    Raises OSError, UnlikeError for a damaged marker, and UsageError for another format.
    """
    from razorctl.training.schemas import Marker

    content = documents.read_bytes(path / MARKER)
    marker: dict[str, Any] = documents.parse(content)
    number = marker.get("format") if isinstance(marker, dict) else None
    if isinstance(number, int) and number != FORMAT:
        raise UsageError(
            f"{path} has format {number}, and this razorctl reads {FORMAT}; resume with razorctl "
            f"{marker.get('razorctl')}, or name another directory with --out."
        )
    documents.parse_kind(content, Marker)
    return marker


def _read(path: Path) -> Checkpoint | str:
    """The checkpoint in a directory; for an invalid one, the fault of its marker, or "".

    Raises UsageError for a checkpoint of another format.
    """
    try:
        checkpoint = Checkpoint(path, _marker(path))
    except OSError:
        return ""
    except documents.UnlikeError as error:
        return f"{MARKER}: {error}"
    return checkpoint if checkpoint.intact else ""


def _remove(path: Path) -> None:
    """Removes a checkpoint, as far as possible; its marker goes first."""
    with suppress(OSError):
        (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
