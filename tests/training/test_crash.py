"""Runs that are killed at random instants."""

import json
import sys

from tests.forked import Forked
from tests.models import registered


def crash(*args: str) -> None:
    """The bench `crash` with a small model."""
    import crash

    sys.argv[1:] = args
    with registered(shallow=True):
        crash.main()


def test_killed_runs_end_with_the_weights_of_one_that_was_not(tmp_path):
    case = ("--kills", "5", "--steps", "12", "--methods", "prebackrazor++, joint budget 0.5")
    code, _, errors = Forked(crash, *case, "--out", "crash.json", folder=tmp_path).ended()
    assert code == 0, errors
    (row,) = json.loads((tmp_path / "crash.json").read_text())["cases"].values()
    assert row["kills"] == 5
    assert row["bit_identical"]
