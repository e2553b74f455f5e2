"""Errors a user can mend: one sentence each, with the exit code the command line ends with."""


class RazorError(Exception):
    """Anything razorctl refuses or cannot do."""

    exit_code = 1


class UsageError(RazorError, ValueError):
    """An argument, flag or setting that cannot be honoured."""

    exit_code = 2
