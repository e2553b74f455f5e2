"""The directory of a run: its name, its files, and what a run that stopped early has written."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from razorctl.errors import UsageError

CONFIG, METRICS = "config.toml", "metrics.jsonl"  # written from the start
WEIGHTS, RESULT = "model.safetensors", "result.json"  # written at the end
SPLIT = "split.json"  # the rows that were put aside or skipped, if any were


def choose(out: Path | str | None, *words: str) -> Path:
    """`out`, or for None a path under runs/ named by `words` and the time; makes no directory.

    Of a word that is a path only the last part is taken.

    Raises UsageError if the path exists or cannot be made.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        out = Path("runs") / re.sub(
            r"[^\w.+-]+", "-", "-".join([*(Path(w).name for w in words), stamp])
        )
    out = Path(out)
    if out.exists():
        raise _taken(out)
    above = next(path for path in out.parents if path.exists())
    if not above.is_dir():
        raise _unwritable(out, f"{above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(out, f"{above} is not writable")
    return out


def _taken(out: Path) -> UsageError:
    return UsageError(f"{out} exists already; name another directory with --out.")


def _unwritable(out: Path, reason: str | None) -> UsageError:
    return UsageError(f"cannot write {out} ({reason}); name another directory with --out.")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Makes a run directory; removes it if that or the block inside fails.

    Raises UsageError if the directory exists already or cannot be written.
    """
    missing = [path for path in out.parents if not path.exists()]
    made = False
    try:
        try:
            out.mkdir(parents=True)
            made = True
            (out / METRICS).touch()
        except OSError as error:
            taken = not made and out.exists()
            raise _taken(out) if taken else _unwritable(out, error.strerror) from None
        yield
    except BaseException:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        for path in missing:  # a parent that another run has used is not empty and stays
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `file` if the block succeeds and is removed if not.

    The file gets the permissions of a new file, whatever the writer sets.
    """
    partial = file.with_name(f"{file.name}.partial")
    partial.touch()
    mode = partial.stat().st_mode
    try:
        yield partial
        partial.chmod(mode)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def steps(out: Path) -> int:
    """Number of steps in the metrics of a run."""
    try:
        return (out / METRICS).read_bytes().count(b"\n")
    except OSError:
        return 0


def left(out: Path) -> str:
    """A sentence, without its period, on what a run that stopped early has written."""
    names = [name for name in (CONFIG, METRICS, WEIGHTS, RESULT) if (out / name).exists()]
    if CONFIG not in names:
        return "before the first step; nothing was written"
    told = [f"{name} up to step {steps(out):,}" if name == METRICS else name for name in names]
    lacking = "" if WEIGHTS in names else "; no weights are saved yet"
    return f"{out} holds {', '.join(told[:-1])} and {told[-1]}{lacking}"
