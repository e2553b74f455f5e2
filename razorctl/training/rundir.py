"""The directory of a run: its name, the names of its files, and its lock."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from razorctl.errors import UsageError
from razorctl.system import documents
from razorctl.system.atomic import sweep, taken, unwritable
from razorctl.system.folders import exists, spelled
from razorctl.system.processes import program

if TYPE_CHECKING:
    from filelock import BaseFileLock

CONFIG, METRICS = "config.toml", "metrics.jsonl"  # written from the start
PLAN = "plan.json"  # written from the start too, if the run was planned
PRETRAINED = "pretrained.json"  # and the checksums of the files of its model, if that has any
CHECKPOINTS, LOCK = "checkpoints", ".lock"  # there while the run is not finished
WEIGHTS, RESULT = "model.safetensors", "result.json"  # written at the end
SPLIT = "split.json"  # the rows that were held out or skipped, and digests of all
# Written at the end: the last model if another one is the best, and adapters if it has any.
LAST, ADAPTER = "last/model.safetensors", "adapter/adapter_model.safetensors"
CURVES = "curves.png"  # written at the end by `finetune`, as is one of PREDICTIONS
PREDICTIONS = ("predictions.html", "predictions.png")  # of texts, and of images

# Content of files that razorctl wrote; other tools write files of these names too.
MARK = re.compile(rb'^\[environment\]\s*\n(?:[^[\n].*\n)*?razorctl = "', re.MULTILINE)
MARKS = {SPLIT: re.compile(rb'^{"(dataset|digests)"'), RESULT: re.compile(rb'^{\s*"run_dir"')}

AGAIN = "copy the whole run directory again, or train again"  # how to mend a damaged finished run


def choose(out: Path | str | None, *words: str, resume: bool = False) -> Path:
    """The path of a run: `out`, or for None one under runs/, named by `words` and the time.

    A word that is a path gives its last part. Makes no directory. Raises UsageError if the path
    cannot be made, or if it exists; with `resume` it may have a run.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        name = "-".join([*(Path(word).name for word in words), stamp])
        out = Path("runs") / re.sub(r"[^\w.+-]+", "-", name)
    out = Path(out)
    if spelled(str(out)) != str(out):
        raise unwritable(Path(spelled(str(out))), "its name is not UTF-8")
    if exists(out):
        if not resume:
            raise taken(out, begun=is_run(out))
        if not (is_run(out) or is_blank(out)):
            raise UsageError(f"{out} holds no run; name another directory with --out.")
        return out
    above = next(path for path in out.parents if exists(path))
    if not above.is_dir():
        raise unwritable(out, f"{above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise unwritable(out, f"{above} is not writable")
    return out


def is_run(out: Path) -> bool:
    """Whether `out` has the CONFIG of a run and another of its files.

    A CONFIG alone may be a copy.
    """
    others = exists(out / LOCK), *(is_marked(out / name, mark) for name, mark in MARKS.items())
    return is_marked(out / CONFIG, MARK) and any(others)


def is_marked(file: Path, mark: re.Pattern[bytes]) -> bool:
    """Whether a file has the mark of a file that razorctl wrote."""
    with suppress(OSError):
        return mark.search(documents.read_bytes(file)) is not None
    return False


def is_blank(out: Path, *more: str) -> bool:
    """Whether `out` is a folder with only the files of a run that ended before it wrote CONFIG.

    more: names of other files that may be in it.
    """

    def left(file: Path) -> bool:
        empty = file.name in (LOCK, METRICS) and not file.lstat().st_size
        return (empty or file.name in more) and file.is_file() and not file.is_symlink()

    return out.is_dir() and all(map(left, out.iterdir()))


@contextmanager
def claimed(out: Path, resume: bool = False) -> Iterator["BaseFileLock"]:
    """Makes a run directory and locks it; removes a new directory if the block fails.

    Yields the lock, which the kernel releases when the process ends. A directory that existed, or
    that another process put in place of the new one, is not removed. Raises UsageError if the
    directory exists without `resume`, cannot be written, or is locked by another process.
    """
    missing = [path for path in out.parents if not exists(path)]
    is_new, lock, held = False, None, None
    try:
        try:
            if not (resume and exists(out)):
                out.mkdir(parents=True)
                is_new = True
            lock = _locked(out)
            held = identity(out)
            sweep(out)
        except OSError as error:
            if not is_new and isinstance(error, FileExistsError):
                raise taken(out, begun=is_run(out)) from None
            raise unwritable(out, error.strerror) from None
        yield lock
    except BaseException:
        if is_new and (held is None or identity(out) == held):
            shutil.rmtree(out, ignore_errors=True)
        if lock is not None:
            lock.release()
        for path in missing:  # a parent with other runs is not empty and stays
            with suppress(OSError):
                path.rmdir()
        raise


def _locked(out: Path) -> "BaseFileLock":
    from filelock import FileLock, Timeout

    lock = FileLock(out / LOCK, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UsageError(
            f"another process trains in {out}; wait until it ends, or name another directory with "
            "--out."
        ) from None
    return lock


def identity(out: Path) -> tuple[int, int] | None:
    """The device and inode of a directory's lock file; None without one."""
    try:
        status = (out / LOCK).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def unlock(out: Path, lock: "BaseFileLock") -> None:
    """Removes the lock file of a finished run, and scratch files, if `lock` is held."""
    if not lock.is_locked:
        return
    sweep(out)
    with suppress(OSError):
        (out / LOCK).unlink(missing_ok=True)  # a process that waits locks a new file
    lock.release()


def resuming(out: Path, device: str | None = None, processes: int = 1) -> str:
    """The command that goes on with the run in a directory."""
    words = [*program(processes), "finetune", "--resume", "--out", str(out)]
    if device:
        words += ["--device", device]
    return shlex.join(words)
