"""The threads of a run beside busy processes: a trial settles them, and changes nothing else."""

import os
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.training import run as trainer
from razorctl.training import threads
from razorctl.training.run import Run
from razorctl.training.threads import LEAST, Threads
from tests.cli import kinds
from tests.training import runs
from tests.training.runs import FULL, JOINT

OTHERS = Threads.others

pytestmark = pytest.mark.usefixtures("shallow")

JOB = Job("vit-micro", "digits", batch_size=8, steps=LEAST, evaluate_every=LEAST, mixup=0.2)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Two cores, of which other processes keep one busy; the user has set nothing.

    torch computes with one thread, whatever number it is said to have: two would wait for each
    other in every operation.
    """
    for name in [name for name in os.environ if name.startswith(threads.CHOSEN)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(Threads, "others", 1.0)
    numbers = [2]
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])


@pytest.fixture
def tried(monkeypatch):
    """The numbers of threads that are tried; one thread wins."""
    found, seconds = [], threads.time_passes

    def won(run: Run, numbers):
        found.append(numbers)
        return dict(zip(seconds(run, numbers), (2.0, 1.0), strict=True))

    monkeypatch.setattr(threads, "time_passes", won)
    return found


def begin(out, job: Job = JOB, recipe: Recipe = FULL, resume: bool = False) -> tuple[Run, int]:
    """A run that settles its threads, and their number."""
    with Threads() as settled:
        run = trainer.finetune(
            job, recipe, out=out, device="cpu", resume=resume, settle=settled.settle
        )
        number = torch.get_num_threads()
    assert torch.get_num_threads() == 2  # afterwards, for whoever called
    return run, number


def trained(run: Run) -> Path:
    """The checkpoint of a run of one thread after its next steps."""
    for _ in range(3):
        next(run)
    run.save()
    config = tomllib.loads((run.out / "config.toml").read_text())
    assert config["environment"]["threads"] == 1
    return run.checkpoints.newest.path


@pytest.mark.parametrize(
    ("job", "recipe"),
    [
        (JOB, JOINT),
        (replace(JOB, optimizer="adamw", optimizer_in_backward=True), FULL),
        (replace(JOB, model="bert", dataset="texts.txt", input_size=32, mixup=0.0), JOINT),
    ],
)
def test_a_trial_changes_nothing_but_the_number(job, recipe, tried, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if job.model == "bert":  # whose masks are drawn as rows are read
        kinds.build(tmp_path)
    run, number = begin(tmp_path / "tried", job, recipe)
    assert (tried, number) == ([(2, 1)], 1)
    assert "1 of 2 threads" in run.notes[-1]
    assert "1.0 s instead of 2.0 s" in run.notes[-1]
    torch.set_num_threads(1)
    one, other = trained(run), trained(runs.begin(tmp_path / "one", job, recipe))
    for file in ("model.safetensors", "state.safetensors"):
        assert runs.same(one / file, other / file)


def test_a_resumed_run_has_the_threads_that_it_was_begun_with(tried, tmp_path, monkeypatch):
    run, _ = begin(tmp_path / "run")
    next(run)
    run.save()
    runs.stop(run)
    monkeypatch.setattr(Threads, "others", 0.0)
    again, number = begin(tmp_path / "run", resume=True)
    assert (len(tried), number) == (1, 1)
    assert "as it was begun" in again.notes[-1]
    runs.stop(again)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert begin(tmp_path / "run", resume=True)[1] == 2


@pytest.mark.parametrize(
    ("job", "others", "variable"),
    [
        (JOB, threads.BUSY - 0.1, None),
        (JOB, 1.0, "OMP_WAIT_POLICY"),
        (replace(JOB, steps=LEAST - 1), 1.0, None),
    ],
)
def test_there_is_no_trial(job, others, variable, tried, tmp_path, monkeypatch):
    monkeypatch.setattr(Threads, "others", others)
    if variable:
        monkeypatch.setenv(variable, "passive")
    run, number = begin(tmp_path / "run", job)
    assert (tried, number) == ([], 2)
    assert not any("threads" in note for note in run.notes)


@pytest.mark.parametrize(
    ("own", "cores", "others"), [(1, (4, 4), 1.75), (8, (4, 4), 0.0), (0, (0, 1), 0.25)]
)
def test_what_others_use_is_all_but_what_this_process_uses(
    own, cores, others, tmp_path, monkeypatch
):
    monkeypatch.setattr(Threads, "others", OTHERS)
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)

    def after(seconds: float, own: float, *cores: float) -> None:
        """A file where each core was busy for some time, half of it by nice processes."""
        used = [int(core * os.sysconf("SC_CLK_TCK") / 2) for core in cores]
        lines = [f"cpu{n} {u} {u} 0 99 99 0 0 0 7 7" for n, u in zip((0, 2), used, strict=True)]
        all_ = f"cpu {seconds * 999:.0f} 0 0 0 0 0 0 0 0 0"
        threads.STAT.write_text(
            "\n".join([all_, *lines, lines[0].replace("cpu0", "cpu1"), "ctxt 9"])
        )
        monkeypatch.setattr(time, "monotonic", lambda: seconds)
        monkeypatch.setattr(os, "times", lambda: (own / 2, own / 4, own / 4, 0.0, seconds))

    after(10, 5, 100, 200)
    with Threads() as found:
        after(14, 5 + own, 100 + cores[0], 200 + cores[1])
        assert found.others == pytest.approx(others)
        threads.STAT.unlink()  # as where there is none
    with Threads() as found:
        monkeypatch.setattr(time, "monotonic", lambda: 20)
        assert found.others == 0
