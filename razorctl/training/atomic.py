"""Files and folders that are written completely or not at all, even if the process is killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from razorctl.errors import UsageError

ROOM = 2**20  # bytes of a file that a command writes at its end, such as a report


def unwritable(
    out: Path, reason: str | None, kind: str = "directory", option: str = "--out"
) -> UsageError:
    return UsageError(f"cannot write {out} ({reason}); name another {kind} with {option}.")


def taken(out: Path, begun: bool = False) -> UsageError:
    """The error for a directory that exists; begun: whether one can go on there."""
    mend = "go on there with --resume, or name" if begun else "name"
    return UsageError(f"{out} exists already; {mend} another directory with --out.")


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directory
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `file` if the block succeeds, and else is removed.

    The new file is synced. It gets the permissions of a new file, whatever the writer sets.
    """
    partial = _partial(file)
    partial.unlink(missing_ok=True)  # of a process that was killed
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises UsageError that names `out` if the block, which writes there, raises OSError."""
    try:
        yield
    except OSError as error:
        raise unwritable(out, error.strerror) from None


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `folder` if the block succeeds, and else is removed.

    Raises UsageError if `folder` exists, or if one of them cannot be made.
    """
    if folder.exists():
        raise taken(folder)  # before its name is asked for, which `.` has not
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        with writing(folder):
            partial.mkdir()
        yield partial
        with writing(folder):
            partial.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def check_room(file: Path, option: str, replace: bool = False) -> None:
    """Checks that `atomic_file` could write ROOM bytes, before long work for the file begins.

    option: the option that names the file. Raises UsageError if the file cannot be written, and if
    it exists, unless `replace` says that it may.
    """
    if file.exists() and not (replace and file.is_file()):
        raise UsageError(f"{file} exists already; name another file with {option}.")
    try:
        try:
            _partial(file).write_bytes(bytes(ROOM))
        finally:
            _partial(file).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(file, error.strerror, "file", option) from None
