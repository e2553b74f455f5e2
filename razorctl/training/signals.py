"""Handlers of SIGINT, SIGTERM and SIGHUP, so that a command can write a checkpoint first."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from razorctl.errors import Terminated
from razorctl.system import processes

ENDING = [signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # not on Windows
    ENDING.append(signal.SIGHUP)
TOGETHER = 1.0  # seconds after a signal in which others belong to it


def _raise(number: int, _: object) -> None:
    raise Terminated(128 + number)


@contextmanager
def _handled(handler: Callable[[int, object], None], *numbers: int) -> Iterator[Callable[[], None]]:
    """Inside the block, signals with their default handling call `handler`.

    Yields a function that restores the default handling. In another thread than the main one,
    nothing changes.
    """
    before: dict[int, Any] = {}

    def hand_back() -> None:
        while before:
            signal.signal(*before.popitem())

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            current = signal.getsignal(number)
            if current in (signal.SIG_DFL, signal.default_int_handler, _raise):
                before[number] = signal.signal(number, handler)
    try:
        yield hand_back
    finally:
        hand_back()


@contextmanager
def termination_raises() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise Terminated, and do not end the process at once."""
    with _handled(_raise, *ENDING):
        yield


@contextmanager
def termination_waits() -> Iterator[Callable[[], None]]:
    """Delays SIGTERM and SIGHUP inside the block, so that a child process can be ended first.

    Yields a function that raises Terminated after a signal. The end of the block calls it.
    """
    signals: list[int] = []

    def check() -> None:
        if signals:
            raise Terminated(128 + signals[0])

    with _handled(lambda number, _: signals.append(number), *ENDING):
        yield check
    check()


@contextmanager
def noted() -> Iterator[Callable[[], BaseException | None]]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP is noted; a later one ends the process.

    Signals within TOGETHER seconds are one: a terminal that closes sends several. In a run of
    several processes all signals are only noted: torchrun repeats them, and kills slow processes.

    Yields a function that returns the exception for the first signal, or None. A signal that other
    code handles or ignores is left alone.
    """
    signals: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        signals.append(number)
        if len(signals) == 1:
            first = time.monotonic()
        elif processes.count() == 1 and time.monotonic() - first > TOGETHER:
            hand_back()
            signal.raise_signal(number)

    def stop() -> BaseException | None:
        if not signals:
            return None
        number = signals[0]
        return KeyboardInterrupt() if number == signal.SIGINT else Terminated(128 + number)

    with _handled(note, signal.SIGINT, *ENDING) as hand_back:
        yield stop
