"""The processes of a grid: how one fails, and how a signal ends them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from razorctl.errors import RazorError, Terminated
from razorctl.training import signals
from razorctl.training.comparing import grid
from tests.comparing import NAMED


def test_a_command_that_fails_tells_why():
    def call(code: str) -> RazorError:
        with pytest.raises(RazorError) as caught:
            grid.run_child([sys.executable, "-c", f"import os, sys; {code}"], lambda: None)
        return caught.value

    error = call("print('noise\\nerror: too large; make it small.', file=sys.stderr); sys.exit(4)")
    assert (str(error), error.exit_code) == ("too large; make it small.", 4)
    again = "; lower --lr, such as with `razorctl finetune --resume --out x --lr 1`."
    error = call(f"print('error: nan{again}', file=sys.stderr); sys.exit(1)")
    assert str(error) == "nan; lower --lr."
    error = call("os.kill(os.getpid(), 9)")
    assert "lower --batch-size" in str(error)
    assert error.exit_code == 4
    error = call("sys.exit(3)")
    assert "ended with code 3" in str(error)
    assert error.exit_code == 3


def test_a_run_takes_no_setting_but_that_of_the_kernels_from_the_environment(monkeypatch):
    for name, value in {"RATIO": "0.5", "KERNELS": "torch"}.items():
        monkeypatch.setenv(f"RAZORCTL_{name}", value)
    own = "{name: value for name, value in os.environ.items() if name.startswith('RAZORCTL_')}"
    code = f"import os, pathlib; pathlib.Path('seen').write_text(repr({own}))"
    grid.run_child([sys.executable, "-c", code], lambda: None)
    assert Path("seen").read_text() == "{'RAZORCTL_KERNELS': 'torch'}"


# What stands in for Python in a run: it takes its first step, and does not end.
RUN = """#!/bin/sh
mkdir x/full-0
echo '{"step": 1}' >x/full-0/metrics.jsonl
exec sleep 100
"""


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_the_run_that_is_on_and_begins_no_other(number, code, word):
    Path("run").write_text(RUN)
    Path("run").chmod(0o755)
    args = ["compare", *NAMED, "--methods", "full,razor", "--out", "x", "--device", "cpu", "--json"]
    program = "import sys; sys.executable = './run'; from razorctl.cli.app import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, and what it starts, ignores SIGINT.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        start_new_session=True,
    )
    metrics = Path("x/full-0/metrics.jsonl")
    deadline = time.monotonic() + 120
    try:
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)  # to compare alone
        stdout, stderr = process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nothing goes on
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code
    left = "x holds 0 of 2 runs; continue with --resume --out x"
    assert (stdout, stderr.splitlines()[-1]) == ("", f"error: {word}: {left}.")
    assert metrics.stat().st_size  # it had begun
    assert not Path("x/razor-0").exists()


class TestSigterm:
    """A SIGTERM is held back while a command runs, where it would end the process."""

    @pytest.fixture(autouse=True)
    def default(self, monkeypatch):
        monkeypatch.setattr(grid, "POLL", 0.01)
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        signal.signal(signal.SIGTERM, before)

    def meanwhile(self) -> Any:
        """The handlers of SIGTERM while a command runs."""
        seen = []
        command = [sys.executable, "-c", "import time; time.sleep(0.1)"]
        grid.run_child(command, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
        return seen[0]

    def test_has_its_default_again(self):
        assert callable(self.meanwhile())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_keeps_a_handler_of_somebody_else(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert self.meanwhile() is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    def test_is_left_alone_in_another_thread(self):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(self.meanwhile).result() is signal.SIG_DFL

    def test_that_comes_as_the_command_ends_is_not_lost(self):
        with pytest.raises(Terminated) as caught, signals.termination_waits():
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
