"""The directory of a run: its name, its files, and what is in it when a run has stopped early."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from razorctl.errors import UsageError

CONFIG, METRICS = "config.toml", "metrics.jsonl"  # written from the beginning
WEIGHTS, RESULT = "model.safetensors", "result.json"  # written at the end


def choose(out: Path | str | None, *words: str) -> Path:
    """`out`, or for None a new directory under runs/ that is named by `words`; makes nothing.

    Raises UsageError if it is there already, or where it cannot be made.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        out = Path("runs") / re.sub(r"[^\w.+-]+", "-", "-".join([*words, stamp]))
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
    """Makes a run directory; leaves nothing of it behind if that, or what is inside, fails.

    Raises UsageError if it is there already, or cannot be written.
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
        for path in missing:  # but for those that another run has come into
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Where to write a file that is to be there whole or not at all.

    It gets the permissions that a new file has, whatever the writer sets.
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
    """How many steps of a run are written down."""
    try:
        return (out / METRICS).read_bytes().count(b"\n")
    except OSError:
        return 0


def left(out: Path) -> str:
    """What a run has left that has stopped early, as a sentence without its full stop."""
    names = [name for name in (CONFIG, METRICS, WEIGHTS, RESULT) if (out / name).exists()]
    if CONFIG not in names:
        return "before the first step; nothing was written"
    told = [f"{name} up to step {steps(out):,}" if name == METRICS else name for name in names]
    lacking = "" if WEIGHTS in names else "; no weights are saved yet"
    return f"{out} holds {', '.join(told[:-1])} and {told[-1]}{lacking}"
