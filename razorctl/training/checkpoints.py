"""The checkpoints of a run directory: each is valid as a whole, or not at all.

A checkpoint is the directory checkpoints/step-N. It is written under another name, synced and
renamed, and then gets a marker with the size and the checksum of each of its files. A directory
without a marker, or with other files than the marker says, is not valid. `state` says what is in
one; nothing here imports torch.
"""

import json
import logging
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razorctl.errors import UsageError
from razorctl.training.rundir import CHECKPOINTS, steps, sync, whole

log = logging.getLogger(__name__)

FORMAT = 1  # of the files in a checkpoint; raised when an older razorctl could not read them
MARKER = "checkpoint.json"
PARTIAL = ".partial"
CHUNK = 1 << 20


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
        value = self.marker["score"]
        return None if value is None else float(value)

    @property
    def intact(self) -> bool:
        """Whether the files are still those that were saved."""
        try:
            named = self.path.name == f"step-{self.step:08d}"
            files: dict[str, Any] = self.marker["files"]
            return named and all(_entry(self.path / name) == entry for name, entry in files.items())
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            return False


class Checkpoints:
    """The valid checkpoints of a run directory, oldest first; the newest and the best are kept.

    The best has the highest score, and is the newest of those. A process that trains in the
    directory holds its lock.
    """

    def __init__(self, out: Path) -> None:
        """Reads what is there; a warning names a newer checkpoint that is not valid.

        Raises UsageError for a checkpoint of another format.
        """
        self.folder = out / CHECKPOINTS
        paths = sorted(path for path in self.folder.glob("step-*") if path.suffix != PARTIAL)
        found = {path: _read(path) for path in paths}
        self.valid = [checkpoint for checkpoint in found.values() if checkpoint is not None]
        newest = self.newest.path if self.newest else None
        for path in paths[paths.index(newest) + 1 if newest else 0 :]:
            where = f"step {self.newest.step:,}" if self.newest else "the beginning"
            log.warning("%s is incomplete or damaged; going on from %s.", path, where)

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
        Raises OSError, and leaves all others as they are, if it cannot be written.
        """
        final = self.folder / f"step-{marker['step']:08d}"
        partial = final.with_name(final.name + PARTIAL)
        self._sweep()  # of what a killed process left, which may take the space that is needed
        try:
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
            write(partial)
            files = {file.name: _entry(file) for file in sorted(partial.iterdir())}
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

    def mark(self, checkpoint: Checkpoint, **marks: Any) -> None:
        """Writes the marker of a checkpoint, with these entries too."""
        with whole(checkpoint.path / MARKER) as file:
            file.write_text(json.dumps({**checkpoint.marker, **marks}, indent=2), "utf-8")

    def drop(self, checkpoint: Checkpoint) -> None:
        """Counts a checkpoint as not valid any more."""
        self.valid.remove(checkpoint)

    def _sweep(self) -> None:
        """Removes what a finished save does not need, as far as that is possible."""
        kept = {checkpoint.path for checkpoint in self.valid}
        for path in self.folder.glob("step-*"):
            if path not in kept:
                _remove(path)


def clear(out: Path) -> None:
    """Removes all checkpoints of a finished run, as far as that is possible."""
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def left(out: Path) -> str:
    """What a run that has stopped has saved, as a part of a sentence."""
    taken, marker = steps(out), newest_marker(out)
    if marker is None:
        return f"at step {taken:,}, and no step is saved yet" if taken else "before the first step"
    saved = int(marker["step"])
    total = f"{saved:,} of {marker['settings']['steps']:,}"
    if saved >= taken:
        return f"step {total} is saved"
    return f"at step {taken:,}, and step {total} is saved"


def newest_marker(out: Path) -> Mapping[str, Any] | None:
    """The marker of the newest checkpoint that has one; its files are not read."""
    for path in sorted((out / CHECKPOINTS).glob("step-*"), reverse=True):
        if path.suffix != PARTIAL and (marker := _marker(path)) is not None:
            return marker
    return None


def _marker(path: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((path / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def _read(path: Path) -> Checkpoint | None:
    """The checkpoint in a directory, None if it is not valid."""
    marker = _marker(path)
    if marker is None:
        return None
    if marker.get("format") != FORMAT:
        raise UsageError(
            f"{path} has format {marker.get('format')}, and this razorctl reads {FORMAT}; resume "
            f"with razorctl {marker.get('razorctl')}, or name another directory with --out."
        )
    checkpoint = Checkpoint(path, marker)
    return checkpoint if checkpoint.intact else None


def _entry(file: Path) -> dict[str, int]:
    """Size and checksum of a file."""
    size = checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": checksum}


def _remove(path: Path) -> None:
    """Removes a checkpoint, as far as that is possible; its marker goes first."""
    with suppress(OSError):
        (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
