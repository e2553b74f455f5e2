"""Errors a user can mend: one sentence each, with the exit code the command line ends with."""

from collections.abc import Mapping
from typing import Any


class RazorError(Exception):
    """Anything razorctl refuses or cannot do."""

    exit_code = 1


class UsageError(RazorError, ValueError):
    """An argument, flag or setting that cannot be honored."""

    exit_code = 2


class NoFitError(RazorError):
    """A job that fits a card in no way.

    needed: the smallest budget in which it would, in bytes. document: what was looked at, under the
    keys of `plan --json`.
    """

    exit_code = 3

    def __init__(self, message: str, needed: int, document: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.needed, self.document = needed, document


class DataError(RazorError):
    """A file of weights or data that cannot be read, or does not hold what it should."""

    exit_code = 5


class MissingError(RazorError):
    """A model or data set that is neither in the local cache nor to be had from the hub."""

    exit_code = 6


class Terminated(SystemExit):
    """SIGTERM came while a child ran: the child has been ended, and the process is to end too."""
