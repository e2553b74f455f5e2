"""SIGTERM as an exception, so that what is ended from outside can say what it leaves."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from razorctl.errors import Terminated


def _raise(number: int, _: object) -> None:
    raise Terminated(128 + number)


def _ours() -> bool:
    """Whether we may handle SIGTERM: other threads may not, and another handler is somebody's."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _raise)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside it SIGTERM raises Terminated, where it would have ended the process without a word."""
    if not _ours():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_waits() -> Iterator[Callable[[], None]]:
    """Holds back a SIGTERM that would end this process alone and let its child go on.

    What it yields raises Terminated if one has come, and so does leaving.
    """
    came: list[int] = []

    def check() -> None:
        if came:
            raise Terminated(128 + signal.SIGTERM)

    if not _ours():
        yield check
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)
    check()
