"""Runs that are killed at random instants."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_runs_end_with_the_weights_of_one_that_was_not(tmp_path):
    out = tmp_path / "crash.json"
    command = [sys.executable, str(ROOT / "scripts/bench/crash.py"), "--kills", "5"]
    command += ["--steps", "12", "--methods", "prebackrazor++, joint budget 0.5"]
    # A process of its own: what it forks must not miss threads that other tests have started.
    found = subprocess.run(
        [*command, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    (row,) = json.loads(out.read_text())["cases"].values()
    assert row["kills"] == 5
    assert row["bit_identical"]
