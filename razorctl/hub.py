"""Files of models and data sets, from the Hugging Face hub or its local cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from razorctl.errors import DataError, MissingError, RazorError

TIMEOUT = 10  # seconds


def fetch(name: str, repo: str, files: tuple[str, ...], kind: Literal["model", "dataset"]) -> Path:
    """The local folder of a repository with its `files`, which may be patterns.

    New files are downloaded if the hub can be reached; if not, the cached files are used. HF_HOME,
    HF_ENDPOINT and HF_HUB_OFFLINE are honored. Raises MissingError, which contains `name`, if a
    file is neither in the cache nor on the hub.
    """
    # Imported here since it is slow to import and only fetching needs it.
    from huggingface_hub import HfApi, errors, snapshot_download

    problem = "the hub cannot be reached"
    mend = "run once with a network, or point HF_HOME at a cache that has it."
    offline = False
    try:
        # Checked first, since snapshot_download has no timeout on a network that drops packets.
        HfApi().repo_info(repo, repo_type=kind, timeout=TIMEOUT)
    except errors.HfHubHTTPError as error:
        offline, problem = True, f"the hub answers {error.response.status_code} for {repo}"
        mend = "try again later, or run `hf auth login` if it needs access rights."
    except (errors.HTTPError, errors.OfflineModeIsEnabled):
        offline = True
    try:
        folder = Path(
            snapshot_download(
                repo, repo_type=kind, allow_patterns=list(files), local_files_only=offline
            )
        )
        if all(any(folder.glob(file)) for file in files):
            return folder
        if not offline:
            problem = f"{repo} on the hub lacks some of {', '.join(files)}"
            mend = f"choose another {'model' if kind == 'model' else 'data set'}."
    except (errors.HTTPError, errors.LocalEntryNotFoundError):
        pass
    raise MissingError(f"{name} is not in the local cache and {problem}; {mend}")


def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it answers."""
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
    return None


@contextmanager
def reading(name: str, folder: Path) -> Iterator[None]:
    """Turns any error of the block, which reads files in `folder`, into a DataError about `name`.

    folder: the return value of `fetch`. A RazorError is raised unchanged.
    """
    try:
        yield
    except RazorError:
        raise
    except Exception as error:  # the libraries raise many kinds of errors for damaged files
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"{name} cannot be read ({reason}); delete {folder.parents[1]} and run again."
        ) from error
