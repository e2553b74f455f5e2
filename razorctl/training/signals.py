"""SIGINT and SIGTERM, so that a command that is ended can save and say what it has written."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from razorctl import processes
from razorctl.errors import Terminated


def _raise(number: int, _: object) -> None:
    raise Terminated(128 + number)


def _ours() -> bool:
    """Whether we may handle SIGTERM: only in the main thread, and if no other code handles it."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _raise)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside the block, SIGTERM raises Terminated instead of ending the process silently."""
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
    """Delays SIGTERM inside the block, so that a child process can be ended first.

    Yields a function that raises Terminated if SIGTERM has come; the end of the block does too.
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


@contextmanager
def noted() -> Iterator[Callable[[], BaseException | None]]:
    """Inside the block the first SIGINT or SIGTERM is only noted; the next is as before the block.

    Of several processes each only notes all that come: torchrun sends them again, and kills a
    process that takes long.

    Yields a function that returns what the first would have raised, None as long as none came.
    A signal that others handle or ignore is left alone.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: object) -> None:
        came.append(number)
        if processes.count() == 1:
            hand_back()

    def hand_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop() -> BaseException | None:
        if not came:
            return None
        number = came[0]
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler, _raise):
                before[number] = handler
                signal.signal(number, note)
    try:
        yield stop
    finally:
        hand_back()
