"""Signals that are noted, and those that are not."""

import signal

import pytest

from razorctl.errors import Terminated
from razorctl.training import signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def defaults():
    handlers = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(n, h) for n, h in zip(NUMBERS, handlers, strict=True)]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_the_first_is_noted_and_a_later_one_raises(number, second, monkeypatch):
    with signals.termination_raises(), signals.noted() as stop:
        assert stop() is None
        signal.raise_signal(number)
        error = KeyboardInterrupt if number == signal.SIGINT else Terminated
        assert type(stop()) is error
        signal.raise_signal(second)  # at once, as when a terminal closes
        assert type(stop()) is error
        monkeypatch.setattr(signals, "TOGETHER", 0)
        with pytest.raises((KeyboardInterrupt, Terminated)):
            signal.raise_signal(second)
    first, *others = (signal.getsignal(n) for n in NUMBERS)
    assert (first, *others) == (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)


def test_one_that_is_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.noted() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop() is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_of_several_processes_each_only_notes_all_that_come(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(signals, "TOGETHER", 0)
    with signals.termination_raises(), signals.noted() as stop:
        for number in NUMBERS:  # torchrun sends again what a terminal has sent
            signal.raise_signal(number)
        assert type(stop()) is KeyboardInterrupt
