"""A command in a child process, with reports until it ends."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from razorctl.errors import RazorError
from razorctl.training.signals import termination_waits

POLL = 0.25  # seconds between two reports
GOING_ON = re.compile(r", such as with `[^`]* --resume [^`]*`")
KILLED = -getattr(signal, "SIGKILL", 9)


def run_child(command: list[str], report: Callable[[], object]) -> None:
    """Runs a command to its end, and calls `report` every POLL seconds.

    Raises RazorError with the error and the exit code of a failed command, and Terminated after a
    SIGTERM.
    """
    # The command line has all settings; variables must not override them.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAZORCTL_", "FORCE_"))}
    with (
        termination_waits() as check,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    _, messages = process.communicate(timeout=POLL)
                    break
                check()
                report()
        except BaseException:
            process.kill()
            process.wait()  # after a KeyboardInterrupt, Popen would not wait
            raise
    if process.returncode:
        raise _failure(command, process.returncode, messages)


def _failure(command: list[str], code: int, messages: str) -> RazorError:
    """The error of a command; messages: its stderr."""
    sentences = [line for line in messages.splitlines() if line.startswith("error: ")]
    if sentences:
        # A grid repeats a failed run, so the command that continues it is left out.
        sentence = GOING_ON.sub("", sentences[-1].removeprefix("error: "))
    elif code == KILLED:
        sentence, code = "the run was killed, likely out of memory; lower --batch-size.", 4
    else:
        sentence = f"the run ended with code {code} and no error; run `{shlex.join(command)}`."
    failure = RazorError(sentence)
    failure.exit_code = code if code > 0 else 1
    return failure
