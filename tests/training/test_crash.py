"""Runs that are killed at random instants."""

import json
import sys

import pytest

from scripts.bench import crash

pytestmark = pytest.mark.usefixtures("shallow")


def test_killed_runs_end_with_the_weights_of_one_that_was_not(tmp_path, monkeypatch):
    out = tmp_path / "crash.json"
    settings = ["--kills", "5", "--steps", "12", "--methods", "prebackrazor++, joint budget 0.5"]
    monkeypatch.setattr(sys, "argv", ["crash.py", *settings, "--out", str(out)])
    crash.main()
    (row,) = json.loads(out.read_text())["cases"].values()
    assert row["kills"] == 5
    assert row["bit_identical"]
