"""Errors that a user can mend: each is one sentence and has the exit code of the command line."""

import errno
import os
from collections.abc import Mapping
from typing import Any

# Words in general errors of libraries that mean lack of memory: torch's, OpenMP's and Python's
# threads', the C library's, and C++'s.
NO_MEMORY = (
    "DefaultCPUAllocator",
    "can't start new thread",
    "annot allocate memory",
    "out of memory",
    "bad_alloc",
)
FULL = (errno.ENOSPC, errno.EDQUOT)  # no room on a disk
TOO_MANY = (errno.EMFILE, errno.ENFILE)  # too many open files


def first_line(error: BaseException | str) -> str:
    """The first line of the message of any error; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason_of(error: BaseException) -> str:
    """The first line of the message of any error, without its period, for use inside a sentence."""
    return first_line(error).rstrip(".")


def lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that there is no more memory."""
    if error is None or isinstance(error, RazorError):
        return False
    by_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    by_text = getattr(error, "errno", None) == errno.ENOMEM or any(
        w in str(error) for w in NO_MEMORY
    )
    return by_class or by_text or lacks_memory(error.__cause__)


def raise_lack(error: Exception) -> None:
    """Raises an error that is no file's fault: the machine lacks memory, open files or disk."""
    number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
    if number in FULL:
        from datasets import config  # its cache is where reading may store rows

        raise UsageError(
            f"cannot write {config.HF_DATASETS_CACHE} ({os.strerror(number)}); make room there, or "
            "name another folder with HF_DATASETS_CACHE."
        ) from None
    if number in TOO_MANY or lacks_memory(error):
        raise error


class RazorError(Exception):
    """The base of all errors that razorctl raises for users.

    document: partial results under the keys of --json, or None.
    """

    exit_code = 1
    document: Mapping[str, Any] | None = None


class UsageError(RazorError, ValueError):
    """An argument, flag or setting that cannot be honored."""

    exit_code = 2


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a Python function that is of another type."""


class ValuesError(UsageError):
    """A trace has no values, but the model reads them."""


class NoFitError(RazorError):
    """A job that does not fit a card.

    needed: the smallest budget in which it fits, in bytes. document: the ways that were tried,
    under the keys of `plan --json`.
    """

    exit_code = 3

    def __init__(self, message: str, needed: int, document: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.needed, self.document = needed, document


class DivergedError(RazorError):
    """A loss or a gradient that is not finite, before the weights have changed."""


class FigureError(RazorError):
    """A metric of an evaluation that is not finite. what: the sentence without its mend."""

    def __init__(self, name: str) -> None:
        self.what = f"the {name} of the evaluation is not finite"
        super().__init__(f"{self.what}; train again with a lower --lr, or with --precision fp32.")


class OutOfMemoryError(RazorError):
    """The memory of a device does not suffice."""

    exit_code = 4


class DataError(RazorError):
    """A file of weights or data that cannot be read or has unexpected contents."""

    exit_code = 5


class MissingError(RazorError):
    """A model or data set that is not in the local cache and cannot be fetched from the hub."""

    exit_code = 6


class ElsewhereError(RazorError):
    """An error of another process of the same training."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came; the process exits with 128 + its number after its child has ended."""
