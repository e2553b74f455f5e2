"""Helpers that run commands and check how they end."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from razorctl.cli.app import app
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.training import run as trainer

SMALL = ["vit-micro", "digits", "--batch-size", "1024"]
PLANNED = [*SMALL, "--max-ratio", "0.5"]
QUICK = ["--batch-size", "16", "--steps", "3", "--evaluate-every", "3", "--device", "cpu"]


def razorctl(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def done(*args: str) -> dict[str, Any]:
    """The document of a command that must end well."""
    result = razorctl(*args, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def finetune(*args: str) -> Result:
    return razorctl("finetune", "vit-micro", "digits", *QUICK, *args)


def assert_ends_with_an_error(result: Result, sentence: str) -> None:
    """Asserts that one sentence is printed below the header or the first messages."""
    *header, last = result.stderr.splitlines()
    assert len(header) in (0, 2) or (len(header) == 1 and header[0].endswith(" ..."))
    assert last.startswith("error: ")
    assert sentence in last


def assert_resumes_to_the_bit(job: Job, recipe: Recipe | None = None) -> None:
    """Stops a run after two steps, and resumes it: losses and weights equal a whole run's."""
    losses = [step.loss for step in trainer.finetune(job, recipe, out="a", device="cpu")]
    run = trainer.finetune(job, recipe, out="b", device="cpu")
    next(run), next(run)
    run.rescue()
    resumed = trainer.finetune(job, recipe, out="b", device="cpu", resume=True)
    assert [step.loss for step in resumed] == losses[2:]
    weights = [Path(out, "model.safetensors").read_bytes() for out in "ab"]
    assert weights[0] == weights[1]
