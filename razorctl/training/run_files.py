"""The settings, rows and result of a run, in the files of its directory."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.job import STATE, Job
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

ENVIRONMENT = "environment"  # the table of CONFIG with versions and the device
ELSEWHERE = "undo that, or name another directory with --out"  # how to mend a run to resume
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
    """Writes CONFIG, with which `finetune --config` repeats the run, and JSON documents beside it.

    job: the resolved one. threads: of torch on the CPU. plan, split, pretrained: the documents of
    the plan, of the rows and of the model's files, if any.
    """
    import tomli_w

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
    """The resolved job and the recipe of the run in a directory; None if it has no run.

    Raises DataError if they cannot be read.
    """
    if not is_run(out):
        return None
    from razorctl.training.schemas import RunSettings

    tables = {name: table for name, table in read_toml(out / CONFIG).items() if name != ENVIRONMENT}
    documents.check_tables(tables, RunSettings, out / CONFIG, ELSEWHERE)
    return Job(**tables["job"]), Recipe(**tables["recipe"])


def begun_threads(out: Path, threads: int) -> tuple[int, list[str]]:
    """The threads that the run in `out` was started with, and a note if they are not `threads`.

    The last bits of the weights depend on that number.
    """
    begun = read_toml(out / CONFIG)[ENVIRONMENT].get("threads")
    begun = begun if isinstance(begun, int) else threads
    note = (
        f"the run was started with {count(begun, 'thread')} and continues with {threads}, so its "
        f"weights differ in their last bits; set OMP_NUM_THREADS={begun} for the same weights."
    )
    return begun, [] if begun == threads else [note]


def split_document(splits: "Splits") -> dict[str, Any]:
    """The document of the rows of splits, which have digests."""
    document = {**(splits.record or {}), "digests": splits.digests}
    if splits.white is not None:
        document["white"] = splits.white
    if splits.mask_classes:
        document["mask_classes"] = splits.mask_classes
    if splits.box_format:
        document["box_format"] = splits.box_format
    parsed: dict[str, Any] = documents.parse(documents.text(document))  # as `read_split` returns it
    return parsed


def read_split(run: Path) -> dict[str, Any]:
    """The document of the rows of a run; {} without one. Raises DataError if it is damaged."""
    from razorctl.training.schemas import Split

    document = read_document(run / SPLIT, Split) or {}
    return {name: value for name, value in document.items() if value is not None}


def pretrained(out: Path, model: str, files: Sequence[Path]) -> dict[str, Any] | None:
    """The document of the files of a run's pretrained model; None if it has no files.

    Raises UsageError that names the files that have changed since the run was started.
    """
    from razorctl.training.schemas import Pretrained

    if not files:
        return None
    with hub.reading(model, files[0].parent, "correct that"):
        now = {file.name: documents.size_and_checksum(file) for file in files}
    before = read_document(out / PRETRAINED, Pretrained)
    if before is not None and before["files"] != now:
        names = sorted({*before["files"], *now})
        changed = [name for name in names if before["files"].get(name) != now.get(name)]
        raise UsageError(
            f"{model} has changed since {out} began: {', '.join(changed)}; {ELSEWHERE}."
        )
    return documents.sealed({"model": model, "files": now})


def check_files(run: Path, result: Mapping[str, Any], names: Sequence[str]) -> None:
    """Checks files of a finished run, by their paths in its directory.

    Raises MissingError for a missing file, and DataError for a file with another checksum or with
    none.
    """
    checksums = result["checksums"]
    for name in names:
        file = run / name
        if name not in checksums:
            if exists(file):
                raise DataError(f"{file} is not a file of this run; remove it.")
            continue
        if not file.exists():
            raise MissingError(f"{file} is missing; {AGAIN}.")
        with hub.reading(str(file), file.parent, AGAIN):
            if documents.size_and_checksum(file) != checksums[name]:
                raise DataError(
                    f"{file} cannot be read (its checksum differs from {RESULT}'s); {AGAIN}."
                )


def read_document(file: Path, kind: type) -> dict[str, Any] | None:
    """The document in a file of a run directory; None without the file."""
    try:
        document: dict[str, Any] = documents.read(file, kind, ELSEWHERE)
    except FileNotFoundError:
        return None
    return document


def finished_run(run: Path) -> tuple[dict[str, Any], Job]:
    """The result and the job of the finished run in a directory.

    If the folder of its pretrained model is deleted, the model of the job is the run. Raises
    UsageError without a finished run, and DataError for a damaged result.
    """
    if not (exists(run) and run.is_dir()):
        fault = "is not a directory" if exists(run) else "does not exist"
        raise UsageError(f"{run} {fault}; {WRITTEN}.")
    file = run / RESULT
    if is_run(run) and not file.exists():
        raise UsageError(f"the run in {run} is not finished; continue with `{resuming(run)}`.")
    if not is_run(run):
        inside = sorted(
            result.parent for result in run.glob(f"*/{RESULT}") if is_run(result.parent)
        )
        mend = f"name one of them, such as {inside[0]}" if inside else WRITTEN
        raise UsageError(f"{run} holds {'several runs' if inside else 'no run'}; {mend}.")
    from razorctl.training.schemas import RunResult

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
    """Raises UsageError that names the settings of the run in `out` that differ from the wanted.

    settings: of the run. A name in only one of both does not count.
    """
    differing = [n for n in wanted if n in settings and settings[n] != wanted[n]]
    if differing:
        words = (
            f"{name.replace('_', ' ')} {'left out' if settings[name] is None else settings[name]}"
            for name in differing
        )
        # One state cannot be turned into another, but weights can.
        weights = f" and start from its weights, with {out} as MODEL"
        raise UsageError(
            f"{out} was started with {', '.join(words)}; resume it with the same, or name another "
            f"directory with --out{weights if STATE.keys() & set(differing) else ''}."
        )


def steps_taken(out: Path) -> int:
    """The number of steps in the metrics of a run."""
    try:
        return documents.read_bytes(out / METRICS).count(b"\n")
    except OSError:
        return 0
