"""Saves on a disk that is full, at any call or for good."""

import errno
import json
import os
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from razorctl.errors import RazorError
from razorctl.models.timm.micro import VIT_MICRO
from razorctl.system import host_memory
from razorctl.training import export, space, state
from razorctl.training.checkpoints import Checkpoints
from tests.training.runs import JOB, JOINT, begin, resume, steps, stop

pytestmark = pytest.mark.usefixtures("shallow", "warnings_are_seen")


class Disk:
    """A disk that fails at a call, by its number; from then on at all calls, if it is `dead`."""

    CALLS = ("open", "fsync", "mkdir", "rename", "replace", "chmod", "unlink", "rmdir")

    def __init__(self, fails: int, dead: bool, code: int = errno.ENOSPC) -> None:
        self.fails, self.dead, self.code, self.calls = fails, dead, code, 0

    def call(self) -> None:
        self.calls += 1
        if self.calls == self.fails or (self.dead and self.calls > self.fails):
            raise OSError(self.code, os.strerror(self.code))

    def plug(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.CALLS if self.dead else self.CALLS[:-2]:
            patch.setattr(os, name, self.counted(getattr(os, name)))
        path_open = Path.open

        def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = path_open(path, mode, *args, **kwargs)
            if "r" not in mode:
                self.call()
                file = Written(file, self)
            return file

        patch.setattr(Path, "open", opened)

    def counted(self, function: Any) -> Any:
        def calling(*args: Any, **kwargs: Any) -> Any:
            self.call()
            return function(*args, **kwargs)

        return calling


class Written:
    """A file whose writes count as calls."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self.file, self.disk = file, disk

    def write(self, data: Any) -> Any:
        self.disk.call()
        return self.file.write(data)

    def __enter__(self) -> "Written":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@pytest.mark.parametrize("dead", [False, True], ids=["full", "dead"])
def test_a_save_that_fails_at_any_call_leaves_a_valid_checkpoint(
    dead, tmp_path, caplog, monkeypatch
):
    """A dead disk cannot even be cleaned, so files stay as after a killed process."""
    monkeypatch.setitem(VIT_MICRO, "embed_dim", 32)  # files of a tenth of the size
    monkeypatch.setitem(VIT_MICRO, "depth", 1)  # and of fewer writes
    out = tmp_path / "run"
    run = begin(out, recipe=JOINT, steps=1)
    shutil.copytree(out / "checkpoints", tmp_path / "before")
    run.job = replace(run.job, save_every=3)
    next(run)
    failed = 0
    for fails in count(1):
        shutil.rmtree(out / "checkpoints")
        shutil.copytree(tmp_path / "before", out / "checkpoints")
        run.checkpoints = Checkpoints(out)
        caplog.clear()
        disk = Disk(fails, dead)
        with pytest.MonkeyPatch.context() as patch:
            disk.plug(patch)
            saved = run.save()
        saved_steps = steps(out)
        if disk.calls < fails:
            break
        if saved:  # what failed was not needed, such as the removal of the checkpoint before
            assert saved_steps in ([2], [1, 2])
            continue
        failed += 1
        assert "step 2 is not saved (No space left on device); step 1 stays" in caplog.text
        if dead:
            assert saved_steps in ([1], [1, 2])
        else:
            assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
            assert saved_steps == [1]
    assert failed > 20  # it has failed at every kind of call
    assert saved_steps == [2]
    stop(run)
    again = resume(out, run.job, JOINT)
    list(run)
    list(again)
    assert [s.loss for s in again.history] == [s.loss for s in run.history]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_training_goes_on_where_nothing_can_be_written(code, tmp_path, caplog):
    run = begin(tmp_path / "run", steps=1)
    with pytest.MonkeyPatch.context() as patch:
        Disk(1, dead=True, code=code).plug(patch)
        patch.setattr(run.metrics, "_file", FullFile(run.metrics._file, code))
        next(run)
        next(run)
        with pytest.raises(RazorError) as caught:
            list(run)
    assert os.strerror(code) in str(caught.value)
    assert "step 1 of 4 is saved" in str(caught.value)
    assert "--resume --out" in str(caught.value)
    assert caplog.text.count("metrics.jsonl lags behind") == 1
    assert steps(tmp_path / "run") == [1]
    stop(run)
    list(resume(tmp_path / "run"))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


class FullFile:
    """A file that takes five bytes of each write, then none."""

    def __init__(self, file: Any, code: int) -> None:
        self.file, self.code, self.closed = file, code, False
        self.left = 5

    def write(self, data: bytes) -> int:
        if not self.left:
            raise OSError(self.code, os.strerror(self.code))
        self.left = 0
        return int(self.file.write(data[:5]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_disk_without_space_is_refused_before_the_first_step(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=12_345_678)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RazorError, match=r"need 17 MiB, and .* has 11 MiB free"):
        begin(tmp_path / "run", replace(JOB, evaluate_every=1, optimizer="adamw"))
    assert not list(tmp_path.iterdir())


def test_a_host_without_memory_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 2**20)
    job = replace(JOB, optimizer="adamw", optimizer_state="host")
    with pytest.raises(
        RazorError, match=r"on the host needs [0-9.]+ MiB, and this machine has 1.0 MiB"
    ):
        begin(tmp_path / "run", job)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "optimizer_state": "host"},
        {"momentum": 0.0},
    ],
)
def test_a_run_takes_no_more_space_than_was_asked_for(settings, tmp_path, accuracies, monkeypatch):
    accuracies(0.9, 0.1, 0.1, 0.1)
    run = begin(tmp_path / "run", replace(JOB, evaluate_every=1, **settings))
    needed, most = space.needed(run.model, run.job), 0
    write, summary_of = state.write, export.summary_of

    def measure() -> None:
        nonlocal most
        files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
        most = max(most, sum(file.stat().st_size for file in files))

    def written(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        measure()

    def summed(run: Any) -> Any:
        measure()
        return summary_of(run)

    monkeypatch.setattr(state, "write", written)
    monkeypatch.setattr(export, "summary_of", summed)
    list(run)
    assert needed - most < 3 * space.REST
    assert most <= needed
