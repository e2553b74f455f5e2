"""SIGINT, SIGTERM and SIGHUP: a command that is ended can save, and say what it has written."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from razorctl import processes
from razorctl.errors import Terminated

ENDING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
TOGETHER = 1.0


def _raise(number: int, _: object) -> None:
    raise Terminated(128 + number)


@contextmanager
def _handled(handler: Callable[[int, object], None], *numbers: int) -> Iterator[Callable[[], None]]:
    """Inside the block, signals that nobody else handles or ignores call `handler`.

    Yields what gives them back before its end. Only the main thread can handle signals.
    """
    before: dict[int, Any] = {}

    def hand_back() -> None:
        while before:
            signal.signal(*before.popitem())

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            found = signal.getsignal(number)
            if found in (signal.SIG_DFL, signal.default_int_handler, _raise):
                before[number] = signal.signal(number, handler)
    try:
        yield hand_back
    finally:
        hand_back()


@contextmanager
def termination_raises() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise Terminated, and do not end the process silently."""
    with _handled(_raise, *ENDING):
        yield


@contextmanager
def termination_waits() -> Iterator[Callable[[], None]]:
    """Delays SIGTERM and SIGHUP inside the block, so that a child process can be ended first.

    Yields a function that raises Terminated if one has come; the end of the block does too.
    """
    came: list[int] = []

    def check() -> None:
        if came:
            raise Terminated(128 + came[0])

    with _handled(lambda number, _: came.append(number), *ENDING):
        yield check
    check()


@contextmanager
def noted() -> Iterator[Callable[[], BaseException | None]]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP is only noted; later ones are as before.

    What comes within TOGETHER seconds of the first belongs to it: a terminal that closes sends
    several. Of several processes each only notes all that come: torchrun sends them again, and
    kills a process that takes long.

    Yields a function that returns what the first would have raised, None as long as none came.
    A signal that others handle or ignore is left alone.
    """
    came: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        came.append(number)
        if len(came) == 1:
            first = time.monotonic()
        elif processes.count() == 1 and time.monotonic() - first > TOGETHER:
            hand_back()
            signal.raise_signal(number)

    def stop() -> BaseException | None:
        if not came:
            return None
        number = came[0]
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated(128 + number)

    with _handled(note, signal.SIGINT, *ENDING) as hand_back:
        yield stop
