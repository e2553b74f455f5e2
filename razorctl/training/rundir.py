"""The directory of a run: its name, its files, its lock, and the settings of the run in it."""

import os
import platform
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import documents
from razorctl.config.settings import read_toml
from razorctl.errors import UsageError
from razorctl.folders import exists, spelled
from razorctl.job import Job
from razorctl.processes import program
from razorctl.recipe import Recipe
from razorctl.version import __version__

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from razorctl.data import Splits

CONFIG, METRICS = "config.toml", "metrics.jsonl"  # written from the start
PLAN = "plan.json"  # written from the start too, if the run was planned
CHECKPOINTS, LOCK = "checkpoints", ".lock"  # there while the run is not finished
WEIGHTS, RESULT = "model.safetensors", "result.json"  # written at the end
SPLIT = "split.json"  # the rows that were put aside or skipped, and digests of all, unless streamed
ENVIRONMENT = "environment"  # the table of CONFIG that says what the run was run with
# Written at the end: the last model, if the best is another one, and adapters, if there are some.
LAST, ADAPTER = "last/model.safetensors", "adapter/adapter_model.safetensors"
OLD_BEST = "best/model.safetensors"  # of an older razorctl, whose directory was the last model

ROOM = 2**20  # bytes that a file needs that a command writes at its end, such as a report
WRITTEN = "name a directory that `razorctl finetune` has written"
# The mends of damaged ones: of a finished run, and of one to go on with.
AGAIN = "copy the whole run directory again, or train again"
ELSEWHERE = "undo that, or name another directory with --out"


def choose(out: Path | str | None, *words: str, resume: bool = False) -> Path:
    """`out`, or for None a path under runs/ named by `words` and the time; makes no directory.

    Of a word that is a path only the last part is taken. Raises UsageError if the path cannot be
    made, or exists; with `resume` a run may be in it.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        out = Path("runs") / re.sub(
            r"[^\w.+-]+", "-", "-".join([*(Path(w).name for w in words), stamp])
        )
    out = Path(out)
    if spelled(str(out)) != str(out):
        raise _unwritable(Path(spelled(str(out))), "its name is not UTF-8")
    if exists(out):
        if not resume:
            raise _taken(out)
        if not _resumable(out):
            raise UsageError(f"{out} holds no run; name another directory with --out.")
        return out
    above = next(path for path in out.parents if exists(path))
    if not above.is_dir():
        raise _unwritable(out, f"{above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(out, f"{above} is not writable")
    return out


def _resumable(out: Path) -> bool:
    """Whether a run has begun in `out`, or nothing at all."""
    if not out.is_dir():
        return False
    return (out / METRICS).exists() or {file.name for file in out.iterdir()} <= {LOCK}


def _taken(out: Path) -> UsageError:
    begun = (out / METRICS).exists()
    mend = "go on there with --resume, or name" if begun else "name"
    return UsageError(f"{out} exists already; {mend} another directory with --out.")


def _unwritable(out: Path, reason: str | None) -> UsageError:
    return UsageError(f"cannot write {out} ({reason}); name another directory with --out.")


@contextmanager
def claimed(out: Path, resume: bool = False) -> Iterator["BaseFileLock"]:
    """Makes a run directory, and locks it; removes it if that or the block inside fails.

    One that lies there by then in the place of the one that was made stays.

    Yields the lock, which the kernel releases when the process ends. resume: the directory may
    exist, and then stays whatever fails. Raises UsageError if it exists without `resume`, if it
    cannot be written, or if another process has locked it.
    """
    missing = [path for path in out.parents if not exists(path)]
    made, lock, held = False, None, None
    try:
        try:
            if not (resume and exists(out)):
                out.mkdir(parents=True)
                made = True
            lock = _locked(out)
            held = identity(out)
            (out / METRICS).touch()
        except OSError as error:
            taken = not made and not resume and exists(out)
            raise _taken(out) if taken else _unwritable(out, error.strerror) from None
        yield lock
    except BaseException:
        if made and (held is None or identity(out) == held):
            shutil.rmtree(out, ignore_errors=True)
        if lock is not None:
            lock.release()
        for path in missing:  # a parent that another run has used is not empty and stays
            with suppress(OSError):
                path.rmdir()
        raise


def _locked(out: Path) -> "BaseFileLock":
    from filelock import FileLock, Timeout  # imported here: most commands make no directory

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
    """Which file the lock in a directory is; None if there is none."""
    try:
        found = (out / LOCK).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def unlock(out: Path, lock: "BaseFileLock") -> None:
    """Removes the lock of a finished run, if it holds it."""
    if not lock.is_locked:
        return
    with suppress(OSError):
        (out / LOCK).unlink(missing_ok=True)  # who waits for it sees that, and locks a new file
    lock.release()


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
def whole(file: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `file` if the block succeeds and is removed if not.

    What is replaced is on the disk then. The file gets the permissions of a new file, whatever the
    writer sets.
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
        raise _unwritable(out, error.strerror) from None


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """As `whole`, of a folder that does not exist yet; yields a new one beside it.

    Raises UsageError if either cannot be made.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if folder.exists():
            raise UsageError(f"{folder} exists already; name another directory with --out.")
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
    """Checks that `whole` could write a file of ROOM bytes, before long work for it begins.

    option: names the file. Raises UsageError if it could not, and if the file exists, unless it is
    to be replaced.
    """
    if file.exists() and not (replace and file.is_file()):
        raise UsageError(f"{file} exists already; name another file with {option}.")
    try:
        try:
            _partial(file).write_bytes(bytes(ROOM))
        finally:
            _partial(file).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {file} ({error.strerror}); name another file with {option}."
        ) from None


def write_settings(
    out: Path,
    job: Job,
    recipe: Recipe,
    device: str,
    threads: int,
    plan: Mapping[str, Any] | None,
    split: Mapping[str, Any] | None,
) -> None:
    """Writes a razorctl.toml with which the run can be repeated, and JSON documents beside it.

    device: its name. threads: of an operation on the CPU. plan: that of its plan. split:
    `split_document`.
    """
    import tomli_w  # imported here: commands that write no run do not need it

    environment = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "threads": threads,
        "python": platform.python_version(),
        "razorctl": __version__,
        **{name: version(name) for name in ("torch", "timm", "datasets")},
    }
    tables = {"recipe": asdict(recipe), "job": asdict(job), ENVIRONMENT: environment}
    given = {t: {k: v for k, v in d.items() if v is not None} for t, d in tables.items()}
    with whole(out / CONFIG) as file:
        file.write_text(tomli_w.dumps(given), "utf-8")
    for name, document in ((PLAN, plan), (SPLIT, split)):
        if document is not None:
            with whole(out / name) as file:
                file.write_text(documents.text(document), "utf-8")


def settings(out: Path) -> tuple[Job, Recipe] | None:
    """The resolved job and the recipe of the run in a directory; None if none is prepared there.

    Raises DataError if they cannot be read.
    """
    if not exists(out / CONFIG):
        return None
    from razorctl.training.written import Settings  # imported here: few commands need it

    tables = {name: table for name, table in read_toml(out / CONFIG).items() if name != ENVIRONMENT}
    documents.given(tables, Settings, out / CONFIG, ELSEWHERE)
    return Job(**tables["job"]), Recipe(**tables["recipe"])


def threads(out: Path) -> int | None:
    """The number of threads that the run in a directory was begun with, as far as it says."""
    if not exists(out / CONFIG):
        return None
    number = read_toml(out / CONFIG).get(ENVIRONMENT, {}).get("threads")
    return number if isinstance(number, int) and number > 0 else None


def split_document(splits: "Splits") -> dict[str, Any] | None:
    """What the run directory says of the rows of splits; None of streams, which are not known."""
    if splits.digests is None:
        return None
    white = {} if splits.white is None else {"white": splits.white}
    found: dict[str, Any] = documents.parse(
        documents.text({**(splits.record or {}), "digests": splits.digests, **white})
    )
    return found


def known_split(run: Path) -> dict[str, Any]:
    """What a run directory says of its rows; DataError if that is damaged.

    That of a stream says nothing, and one of an older razorctl has no digests.
    """
    from razorctl.training.written import Split  # imported here: few commands need it

    found = document(run / SPLIT, Split) or {}
    return {name: value for name, value in found.items() if value is not None}


def document(file: Path, kind: type) -> dict[str, Any] | None:
    """What `documents.read` returns of a file in a run directory; None if it is not there."""
    try:
        found: dict[str, Any] = documents.read(file, kind, ELSEWHERE)
    except FileNotFoundError:
        return None
    return found


def finished(run: Path) -> tuple[dict[str, Any], Job]:
    """The result and the job of the finished run in a directory.

    The model of the job is the run, if the folder that it began with is gone. Raises UsageError if
    there is no finished run, and DataError if the result is damaged or of another version.
    """
    if not (exists(run) and run.is_dir()):
        what = "is no directory" if exists(run) else "does not exist"
        raise UsageError(f"{run} {what}; {WRITTEN}.")
    file = run / RESULT
    if not file.exists():
        if (run / METRICS).exists():
            raise UsageError(f"the run in {run} is not finished; go on with `{resuming(run)}`.")
        inside = sorted(result.parent for result in run.glob(f"*/{RESULT}"))
        mend = f"name one of them, such as {inside[0]}" if inside else WRITTEN
        raise UsageError(f"{run} holds {'several runs' if inside else 'no run'}; {mend}.")
    from razorctl.training.written import Result  # imported here: few commands need it

    result: dict[str, Any] = documents.read(file, Result, AGAIN)
    job = Job(**result["job"])
    if Path(job.model).is_absolute() and not Path(job.model).exists():
        job = replace(job, model=str(run.resolve()))
    return result, job


def merged(job: Job, recipe: Recipe) -> dict[str, Any]:
    """The settings of a job and a recipe by name; `seed` is the job's."""
    of_recipe = asdict(recipe)
    return {"seed_of_draws": of_recipe.pop("seed"), **of_recipe, **asdict(job)}


def refuse_others(out: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises UsageError that names all settings that are not as in the run in `out`.

    known: the settings of the run. Names that only one of both has do not count.
    """
    other = [name for name in wanted if name in known and known[name] != wanted[name]]
    if other:
        told = (
            f"{name.replace('_', ' ')} {'left out' if known[name] is None else known[name]}"
            for name in other
        )
        raise UsageError(
            f"{out} was begun with {', '.join(told)}; resume it with the same, or name another "
            "directory with --out."
        )


def resuming(out: Path, device: str | None = None, processes: int = 1) -> str:
    """The command that goes on with the run in a directory, on a device if one was asked for."""
    words = [*program(processes), "finetune", "--resume", "--out", str(out)]
    return shlex.join([*words, *(("--device", device) if device else ())])


def steps(out: Path) -> int:
    """Number of steps in the metrics of a run."""
    try:
        return (out / METRICS).read_bytes().count(b"\n")
    except OSError:
        return 0
