"""The settings, rows and result of a run, in the files of its directory."""

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from razorctl.errors import DataError, MissingError, UsageError
from razorctl.system import documents, hub
from razorctl.system.atomic import atomic_file
from razorctl.system.folders import exists
from razorctl.training.rundir import (
    AGAIN,
    CONFIG,
    METRICS,
    PLAN,
    PRETRAINED,
    RESULT,
    SPLIT,
    is_run,
    resuming,
)
from razorctl.units import count
from razorctl.version import __version__

if TYPE_CHECKING:
    from razorctl.data import Splits

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"  # the table of CONFIG that says what the run was run with
ELSEWHERE = "undo that, or name another directory with --out"  # the mend of a run to go on with
WRITTEN = "name a directory that `razorctl finetune` has written"


def write_settings(
    out: Path,
    job: Job,
    recipe: Recipe,
    *,
    device: str,
    threads: int,
    plan: Mapping[str, Any] | None,
    split: Mapping[str, Any] | None,
    pretrained: Mapping[str, Any] | None,
) -> None:
    """Writes a razorctl.toml with which the run can be repeated, and JSON documents beside it.

    job: the resolved one. threads: the number of torch's threads on the CPU. plan, split,
    pretrained: the documents of the plan, of the rows and of the model's files, if there are any.
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
    for name, table in tables.items():  # TOML has no null
        tables[name] = {key: value for key, value in table.items() if value is not None}
    with atomic_file(out / CONFIG, replace=True) as file:
        file.write_text(tomli_w.dumps(tables), "utf-8")
    for name, document in ((PLAN, plan), (SPLIT, split), (PRETRAINED, pretrained)):
        if document is not None:
            with atomic_file(out / name, replace=True) as file:
                file.write_text(documents.text(document), "utf-8")


def read_settings(out: Path) -> tuple[Job, Recipe] | None:
    """The resolved job and the recipe of the run in a directory; None without a prepared run.

    Raises DataError if they cannot be read.
    """
    if not is_run(out):
        return None
    from razorctl.training.schemas import RunSettings  # imported here: few commands need it

    tables = {name: table for name, table in read_toml(out / CONFIG).items() if name != ENVIRONMENT}
    documents.check_tables(tables, RunSettings, out / CONFIG, ELSEWHERE)
    return Job(**tables["job"]), Recipe(**tables["recipe"])


def begun_threads(out: Path, threads: int) -> tuple[int, list[str]]:
    """The threads that the run in `out` was begun with, and a note unless they are `threads`.

    The bits of the weights depend on that number. A run that does not say it has `threads`.
    """
    begun = read_toml(out / CONFIG).get(ENVIRONMENT, {}).get("threads")
    begun = begun if isinstance(begun, int) else threads
    note = (
        f"the run was begun with {count(begun, 'thread')} and goes on with {threads}, so its "
        f"weights differ in their last bits; OMP_NUM_THREADS={begun} keeps them."
    )
    return begun, [] if begun == threads else [note]


def split_document(splits: "Splits") -> dict[str, Any]:
    """The document of the rows of splits with digests."""
    white = {} if splits.white is None else {"white": splits.white}
    masks = {"mask_classes": splits.mask_classes} if splits.mask_classes else {}
    document = {**(splits.record or {}), "digests": splits.digests, **white, **masks}
    parsed: dict[str, Any] = documents.parse(documents.text(document))  # as it is read again
    return parsed


def read_split(run: Path) -> dict[str, Any]:
    """The document of the rows of the run in a directory; DataError if it is damaged.

    That of an older razorctl may have no digests, or be empty.
    """
    from razorctl.training.schemas import Split  # imported here: few commands need it

    document = read_document(run / SPLIT, Split) or {}
    return {name: value for name, value in document.items() if value is not None}


def pretrained(out: Path, model: str, files: Sequence[Path]) -> dict[str, Any] | None:
    """The document of the files that the run in `out` begins from; None if there are none.

    Raises UsageError that names those that have changed since the run was begun.
    """
    from razorctl.training.schemas import Pretrained  # imported here: few commands need it

    if not files:
        return None
    with hub.reading(model, files[0].parent, "correct that"):
        now = {file.name: documents.size_and_checksum(file) for file in files}
    before = read_document(out / PRETRAINED, Pretrained)
    if before is not None and before["files"] != now:
        names = sorted({*before["files"], *now})
        changed = [name for name in names if before["files"].get(name) != now.get(name)]
        raise UsageError(
            f"{model} has changed since {out} was begun: {', '.join(changed)}; {ELSEWHERE}."
        )
    if before is None and is_run(out):
        log.warning(
            "%s was begun by an older razorctl, which took no checksums of %s; the run goes on "
            "with the files that are there now.",
            *(out, model),
        )
    return documents.sealed({"model": model, "files": now})


def check_files(run: Path, result: Mapping[str, Any], names: Sequence[str]) -> None:
    """Checks files of a finished run, by their paths in its directory, before they are read.

    A note tells of those that an older razorctl took no checksum of. Raises MissingError and
    DataError that name a file that is gone or another one.
    """
    checksums = result.get("checksums", {})
    unknown = [name for name in names if name not in checksums and exists(run / name)]
    for name in (name for name in names if name in checksums):
        file = run / name
        if not file.exists():
            raise MissingError(f"{file} is missing; {AGAIN}.")
        with hub.reading(str(file), file.parent, AGAIN):
            if documents.size_and_checksum(file) != checksums[name]:
                raise DataError(
                    f"{file} cannot be read (its checksum is not that of {RESULT}); {AGAIN}."
                )
    if METRICS in checksums and unknown:  # of an older razorctl it has those of weights alone
        raise DataError(f"{run / unknown[0]} is no file of this run; remove it.")
    if unknown:
        log.warning(
            "%s is of an older razorctl, which took no checksum of %s.", run, ", ".join(unknown)
        )


def read_document(file: Path, kind: type) -> dict[str, Any] | None:
    """The document in a file of a run directory; None if there is no file."""
    try:
        document: dict[str, Any] = documents.read(file, kind, ELSEWHERE)
    except FileNotFoundError:
        return None
    return document


def finished_run(run: Path) -> tuple[dict[str, Any], Job]:
    """The result and the job of the finished run in a directory.

    The model of the job is the run, if the folder that it began with is gone. Raises UsageError if
    there is no finished run, and DataError if the result is damaged or of another version.
    """
    if not (exists(run) and run.is_dir()):
        fault = "is no directory" if exists(run) else "does not exist"
        raise UsageError(f"{run} {fault}; {WRITTEN}.")
    file = run / RESULT
    if is_run(run) and not file.exists():
        raise UsageError(f"the run in {run} is not finished; go on with `{resuming(run)}`.")
    if not is_run(run):
        inside = sorted(
            result.parent for result in run.glob(f"*/{RESULT}") if is_run(result.parent)
        )
        mend = f"name one of them, such as {inside[0]}" if inside else WRITTEN
        raise UsageError(f"{run} holds {'several runs' if inside else 'no run'}; {mend}.")
    from razorctl.training.schemas import RunResult  # imported here: few commands need it

    result: dict[str, Any] = documents.read(file, RunResult, AGAIN)
    job = Job(**result["job"])
    if Path(job.model).is_absolute() and not Path(job.model).exists():
        job = replace(job, model=str(run.resolve()))
    return result, job


def merged_settings(job: Job, recipe: Recipe) -> dict[str, Any]:
    """The settings of a job and a recipe by name; `seed` is the job's."""
    settings = asdict(recipe)
    return {"seed_of_draws": settings.pop("seed"), **settings, **asdict(job)}


def refuse_others(out: Path, settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises UsageError that names all settings of the run in `out` that differ from the wanted.

    settings: those of the run. Names that are in only one of both do not count.
    """
    differing = [n for n in wanted if n in settings and settings[n] != wanted[n]]
    if differing:
        words = (
            f"{name.replace('_', ' ')} {'left out' if settings[name] is None else settings[name]}"
            for name in differing
        )
        raise UsageError(
            f"{out} was begun with {', '.join(words)}; resume it with the same, or name another "
            "directory with --out."
        )


def steps_taken(out: Path) -> int:
    """The number of steps in the metrics of a run."""
    try:
        return documents.read_bytes(out / METRICS).count(b"\n")
    except OSError:
        return 0
