"""Files of models and data sets from the Hugging Face hub or its local cache; uploads of models."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from razorctl.errors import DataError, MissingError, RazorError, UsageError, raise_lack, reason_of
from razorctl.system import documents
from razorctl.system.atomic import atomic_file

if TYPE_CHECKING:
    from datasets import Dataset

TIMEOUT = 10  # seconds


def fetch(
    name: str,
    repo: str,
    files: tuple[str, ...],
    kind: Literal["model", "dataset"],
    more: tuple[str, ...] = (),
    revision: str | None = None,
) -> Path:
    """The local folder of a repository with its `files`, which may be patterns.

    New files are downloaded if the hub can be reached, else the cached files are used. HF_HOME,
    HF_ENDPOINT and HF_HUB_OFFLINE are honored. Raises MissingError that contains `name` if a file
    is neither in the cache nor on the hub.

    Args:
        name: the name in errors.
        repo: the repository.
        files: patterns of the required files.
        kind: the kind of the repository.
        more: patterns of files that are fetched too, if they exist.
        revision: a branch; None for the main one.
    """
    # Imported here since it is slow to import and only fetching needs it.
    from huggingface_hub import errors, snapshot_download

    info, problem, mend = _ask(repo, kind, revision)
    offline = info is None
    try:
        folder = Path(
            snapshot_download(
                repo,
                repo_type=kind,
                revision=revision,
                allow_patterns=[*files, *more],
                local_files_only=offline,
            )
        )
        if all(any(path.exists() for path in folder.glob(file)) for file in files):
            return folder
        if not offline:
            problem = f"{repo} on the hub lacks some of {', '.join(files)}"
            mend = f"choose another {'model' if kind == 'model' else 'data set'}."
    except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:
        refusal = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        if isinstance(refusal, errors.HfHubHTTPError):  # for a file: listing needs no access rights
            problem, mend = _answer(refusal.response.status_code, repo)
    raise MissingError(f"{name} is not in the local cache and {problem}; {mend}")


def unreachable() -> str | None:
    """The reason why the hub cannot be reached; None if it answers."""
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
    return None


def _ask(
    repo: str, kind: Literal["model", "dataset"], revision: str | None = None
) -> tuple[Any, str, str]:
    """The hub's answer for a repository; else None, the problem, and how to solve it."""
    from huggingface_hub import HfApi, errors

    problem = "the hub cannot be reached"
    mend = "run once with a network, or point HF_HOME at a cache that has it."
    try:
        # Asked first, since snapshot_download has no timeout on a network that drops packets.
        info = HfApi().repo_info(repo, repo_type=kind, revision=revision, timeout=TIMEOUT)
        return info, problem, mend
    except errors.HfHubHTTPError as error:
        problem, mend = _answer(error.response.status_code, repo)
    except (errors.HTTPError, errors.OfflineModeIsEnabled):
        pass
    return None, problem, mend


def _answer(status: int, repo: str) -> tuple[str, str]:
    """The problem behind a status code of the hub, and how to solve it."""
    mend = "try again later, or run `hf auth login` if it needs access rights."
    return f"the hub answers {status} for {repo}", mend


def listing(name: str, repo: str) -> list[str]:
    """The paths of all files in a data set's repository; without the hub, as last seen.

    Raises MissingError that contains `name` if they are not known.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}"
    stored = folder / "razorctl-listing.json"  # in the cache, so that it is copied with it
    info, problem, mend = _ask(repo, "dataset")
    if info is not None:
        files = sorted(file.rfilename for file in info.siblings or ())
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(stored, replace=True) as file:
                file.write_text(documents.text(files))
        return files
    if (files := documents.read_cached(stored, list[str])) is not None:
        return list(files)
    snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        raise MissingError(f"{name} is not in the local cache and {problem}; {mend}")
    newest = snapshots[-1]
    return sorted(f.relative_to(newest).as_posix() for f in newest.rglob("*") if f.is_file())


def shapes(repo: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights in a model's repository, by the files' headers; may be empty."""
    from huggingface_hub import HfApi, errors

    unknown = (errors.HTTPError, errors.OfflineModeIsEnabled, errors.SafetensorsParsingError)
    with suppress(errors.NotASafetensorsRepoError, *unknown):
        headers = HfApi().get_safetensors_metadata(repo, timeout=TIMEOUT).files_metadata.values()
        return {name: (*of.shape,) for each in headers for name, of in each.tensors.items()}
    return {}


def license_of(repo: str) -> str | None:
    """The license of a model's repository by its card; None if it is unknown."""
    info, _, _ = _ask(repo, "model")
    card = None if info is None else info.card_data
    return card.license if card is not None and isinstance(card.license, str) else None


def check_name(repo: str) -> None:
    """Raises UsageError if the hub does not allow this name, or if it names no owner."""
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except errors.HFValidationError as error:
        raise UsageError(
            f"the hub allows no such name ({reason_of(error)}); choose another."
        ) from None
    if "/" not in repo:
        raise UsageError(f"{repo} names no owner; write ORG/NAME, where ORG may be yourself.")


def check_access(repo: str) -> None:
    """Raises MissingError if the hub accepts no token, or cannot be reached."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise MissingError(
            f"{repo} cannot be written without a token of the hub; run `hf auth login`, or set "
            "HF_TOKEN."
        )
    with _writing(repo):
        HfApi().whoami()


def push(files: Mapping[str, Path], repo: str, private: bool, message: str) -> str:
    """Commits files, by their paths there, to the main branch of a model's repository.

    Creates the repository if there is none; an existing one keeps its other files. Returns the
    address of the commit. Raises MissingError if the hub refuses it or cannot be reached.

    private: whether a new repository is private.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    with _writing(repo):
        HfApi().create_repo(repo, private=private or None, exist_ok=True)
        added = [CommitOperationAdd(place, file) for place, file in files.items()]
        commit = HfApi().create_commit(repo, added, commit_message=message)
    return str(commit.commit_url)


@contextmanager
def _writing(repo: str) -> Iterator[None]:
    """Turns errors of the block, which asks the hub for `repo`, into MissingError; hides bars."""
    from huggingface_hub import errors
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except errors.HfHubHTTPError as error:
        problem, mend = _answer(error.response.status_code, repo)
        raise MissingError(f"{repo} cannot be written: {problem}; {mend}") from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise MissingError(
            f"{repo} cannot be written: the hub cannot be reached; run again with a network."
        ) from error
    except Exception as error:  # its libraries raise their own kinds for broken connections
        reason = reason_of(error.__cause__ or error)
        raise MissingError(
            f"{repo} cannot be written ({reason}); run the same command again."
        ) from error
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def quiet_without_terminal() -> Iterator[None]:
    """Hides the progress bars of `datasets` inside it, unless a terminal shows them."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not (are_progress_bars_disabled() or sys.stderr.isatty())
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()


def cached(name: str) -> Path:
    """The path of a file of razorctl's in the cache of data sets."""
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "razorctl" / name


def stored_batches(file: Path, schema: Any, batches: Iterable[Any], most: int) -> "Dataset":
    """The rows of record batches: in memory up to `most` bytes, else in a file.

    `cached` names the file, which is written once; several processes may do so at the same time.
    Raises UsageError that names the cache if it is full.
    """
    import datasets
    import pyarrow as pa

    if not file.exists():
        batches, first, size = iter(batches), [], 0
        for batch in batches:
            first.append(batch)
            size += batch.nbytes
            if size > most:
                break
        else:
            return datasets.Dataset(pa.Table.from_batches(first, schema))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file, replace=True) as new, pa.ipc.new_stream(str(new), schema) as out:
                for batch in chain(first, batches):
                    out.write_batch(batch)
        except OSError as error:
            raise_lack(error)
            raise
    return datasets.Dataset.from_file(str(file))


@contextmanager
def reading(name: str, folder: Path, mend: str | None = None) -> Iterator[None]:
    """Turns any error of the block, which reads files in `folder`, into a DataError about `name`.

    folder: as returned by `fetch`. mend: the end of the sentence; None for a folder in the hub's
    cache. A RazorError is raised unchanged.
    """
    try:
        yield
    except RazorError:
        raise
    except Exception as error:  # the libraries raise many kinds of errors for damaged files
        raise_lack(error)
        cause = error.__cause__ or error
        reason = reason_of(cause)
        mend = mend or f"delete {folder.parents[1]} and run again"
        raise DataError(f"{name} cannot be read ({reason}); {mend}.") from error
