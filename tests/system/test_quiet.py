"""Warnings of libraries about each other are not shown, and all else is."""

import logging
import warnings

import pytest
from torch import nn, zeros

from razorctl.system.quiet import LOGGED, hush
from scripts.bench.passes import peak_bytes


@pytest.mark.parametrize("name", LOGGED)
def test_of_a_logger_one_message_is_not_shown(name):
    seen, log = [], logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    log.addHandler(handler)
    try:
        for _ in range(2):
            hush()
        log.warning(f"%s: {LOGGED[name]}, and so on", "it")
        log.warning("all else")
    finally:
        log.removeHandler(handler)
    assert seen == ["all else"]


class Twice(nn.Linear):
    """Runs inside itself, of which torch's tracker warns."""

    def forward(self, x, inner=True):
        return self(super().forward(x), inner=False) if inner else super().forward(x)


def test_a_trace_warns_of_nothing_that_runs_inside_itself():
    formatted = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_bytes(nn.Sequential(Twice(4, 4)), zeros(2, 4)) > 0
    assert warnings.formatwarning is formatted
