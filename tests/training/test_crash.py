"""Runs that are killed at random instants."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a run imports is imported once, before its processes are forked, and its model is small.
SCRIPT = """
import datasets, timm, torch._dynamo, torchmetrics
import crash
from tests.models import registered

with registered(shallow=True):
    crash.main()
"""


def test_killed_runs_end_with_the_weights_of_one_that_was_not(tmp_path):
    out = tmp_path / "crash.json"
    # A process of its own: what it forks must not miss threads that other tests have started.
    command = [sys.executable, "-c", SCRIPT, "--kills", "5", "--steps", "12"]
    found = subprocess.run(
        [*command, "--methods", "prebackrazor++, joint budget 0.5", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts/bench'}"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    (row,) = json.loads(out.read_text())["cases"].values()
    assert row["kills"] == 5
    assert row["bit_identical"]
