"""Runs that tests begin, stop and resume."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.system import documents
from razorctl.training.checkpoints import Checkpoints
from razorctl.training.run import Run, finetune

JOB = Job("vit-micro", "digits", batch_size=8, steps=4, evaluate_every=100, save_every=1)
FULL = Recipe("full")
JOINT = Recipe("prebackrazor++", joint_budget=0.5)


def begin(out: Path, job: Job = JOB, recipe: Recipe = FULL, steps: int = 0) -> Run:
    """A run in `out` after some steps."""
    run = finetune(job, recipe, out=out, device="cpu")
    for _ in range(steps):
        next(run)
    return run


def resume(out: Path, job: Job = JOB, recipe: Recipe = FULL) -> Run:
    """The run in `out`, resumed as by another process, whose random generators differ."""
    torch.manual_seed(123)
    random.seed(123)
    numpy.random.seed(123)
    return finetune(job, recipe, out=out, device="cpu", resume=True)


def stop(run: Run) -> None:
    assert run.lock is not None
    run.lock.release()


def steps(out: Path) -> list[int]:
    return [checkpoint.step for checkpoint in Checkpoints(out).valid]


def edit_result(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the result of a finished run, and seals it again."""
    result = json.loads((run / "result.json").read_text())
    change(result)
    (run / "result.json").write_text(json.dumps(documents.sealed(result)))


def same(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of razorctl's loggers, without those of torch's compiler."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("razorctl")]
