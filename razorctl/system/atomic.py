"""Files and folders that are written completely or not at all, and replace nothing unasked.

A new file has a random name beside its target until it is complete. So it cannot hit an existing
link or file, and only files that were created here are removed.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from razorctl.errors import UsageError, lacks_memory

ROOM = 2**20  # bytes of a file that a command writes at its end, such as a report
LEFT = re.compile(r"\.razorctl-[0-9a-f]{32}(\.\w+)?")  # names that a killed process leaves


def unwritable(
    out: Path, reason: str | None, kind: str = "directory", option: str = "--out"
) -> UsageError:
    return UsageError(f"cannot write {out} ({reason}); name another {kind} with {option}.")


def taken(
    out: Path, begun: bool = False, kind: str = "directory", option: str = "--out"
) -> UsageError:
    """The error for a path that exists; begun: whether a run can be resumed there."""
    mend = "continue there with --resume, or name" if begun else "name"
    return UsageError(f"{out} exists already; {mend} another {kind} with {option}.")


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a directory
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(file: Path, replace: bool = False, option: str = "--out") -> Iterator[Path]:
    """Yields the path of a new file that becomes `file` if the block succeeds, else is removed.

    The new file is synced. It gets the permissions of a new file, whatever the writer sets. Raises
    UsageError that names `option` if `file` exists by then, unless it may be replaced.
    """
    partial = _beside(file)
    partial.touch(exist_ok=False)
    try:
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)
        sync(partial)
        if replace:
            partial.replace(file)
        else:
            _publish(partial, file, option)
        with nullcontext() if replace else undoing(file.unlink):
            sync(file.parent)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _publish(partial: Path, file: Path, option: str) -> None:
    """Gives a file its name; raises UsageError if something has that name."""
    try:
        try:
            file.hardlink_to(partial)
        except FileExistsError:
            raise
        except (OSError, NotImplementedError):  # a file system without links
            file.touch(exist_ok=False)
            with undoing(file.unlink):
                partial.replace(file)
    except FileExistsError:
        raise taken(file, kind="file", option=option) from None


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo`, as far as possible, if the block raises."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            undo()
        raise


@contextmanager
def writing(out: Path, kind: str = "directory", option: str = "--out") -> Iterator[None]:
    """Raises UsageError that names `out` if the block, which writes there, raises OSError."""
    try:
        yield
    except OSError as error:
        if lacks_memory(error):
            raise
        if isinstance(error, FileExistsError):
            raise taken(out, kind=kind, option=option) from None
        raise unwritable(out, error.strerror, kind, option) from None


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yields a new folder in `folder`, which is removed after the block."""
    partial = _beside(folder / "any")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `folder` if the block succeeds, else is removed.

    Raises UsageError if `folder` exists, or if anything, the block included, raises OSError.
    """
    if os.path.lexists(folder):
        raise taken(folder)  # before `_beside`, which needs a name, and `.` has none
    with writing(folder), scratch(folder.parent) as partial:
        yield partial
        folder.mkdir()  # fails if something has appeared; a rename would replace it
        if os.name == "nt":
            folder.rmdir()  # there a rename replaces nothing
        with undoing(folder.rmdir):
            partial.replace(folder)
        with undoing(lambda: folder.replace(partial)):
            sync(folder.parent)


def _beside(target: Path) -> Path:
    """An unused path beside `target`, with its suffix, which some writers read."""
    suffix = target.suffix if LEFT.fullmatch(f".razorctl-{'0' * 32}{target.suffix}") else ""
    return target.with_name(f".razorctl-{secrets.token_hex(16)}{suffix}")


def sweep(folder: Path) -> None:
    """Removes, as far as possible, what killed processes left in a folder of razorctl's."""
    with suppress(OSError):
        for path in folder.iterdir():
            if LEFT.fullmatch(path.name):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def check_room(file: Path, option: str, replace: bool = False) -> None:
    """Checks that `atomic_file` could write ROOM bytes, before long work for the file begins.

    option: names the file. Raises UsageError if the file cannot be written. Raises it, too, if the
    path exists, except for a file with `replace`.
    """
    if os.path.lexists(file) and not (replace and file.is_file()):
        raise taken(file, kind="file", option=option)
    with writing(file, "file", option):
        partial = _beside(file)
        partial.touch(exist_ok=False)
        try:
            partial.write_bytes(bytes(ROOM))
        finally:
            partial.unlink(missing_ok=True)
