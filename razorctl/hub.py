"""Files of models and data sets, from the hub or from its local cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from razorctl.errors import DataError, MissingError, RazorError

TIMEOUT = 10  # seconds


def fetch(name: str, repo: str, files: tuple[str, ...], kind: Literal["model", "dataset"]) -> Path:
    """The local folder of a repository, with its `files`, which may be patterns.

    Where the hub can be reached it is asked for what is new; else what is cached has to do.
    HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are honored. Raises MissingError, with the `name` that
    users know, if a file is not to be had.
    """
    # Imported here: it is slow to import, and only fetching needs it.
    from huggingface_hub import HfApi, errors, snapshot_download

    problem = "the hub cannot be reached"
    mend = "run once with network, or point HF_HOME at a cache that has it."
    offline = False
    try:
        # Asked here because snapshot_download waits without limit for a network that drops packets.
        HfApi().repo_info(repo, repo_type=kind, timeout=TIMEOUT)
    except errors.HfHubHTTPError as error:
        offline, problem = True, f"the hub answers {error.response.status_code} for {repo}"
        mend = "try again later, or run `hf auth login` if it may be read by some only."
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
            problem, mend = f"{repo} on the hub lacks some of {', '.join(files)}", "name another."
    except (errors.HTTPError, errors.LocalEntryNotFoundError):
        pass
    raise MissingError(f"{name} is not in the local cache and {problem}; {mend}")


@contextmanager
def reading(name: str, folder: Path) -> Iterator[None]:
    """Turns whatever goes wrong with what `fetch` returned into a DataError that says so."""
    try:
        yield
    except RazorError:
        raise
    except Exception as error:  # damage shows itself in any of the libraries' errors
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"{name} cannot be read ({reason}); delete {folder.parents[1]} and run again."
        ) from error
