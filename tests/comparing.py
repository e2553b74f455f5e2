"""The command, and runs that nobody trained, for the tests of comparison and grid."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from typer.testing import CliRunner, Result

import razorctl
from razorctl.cli.app import app
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.system import documents

NAMED = ["vit-micro", "digits"]


def compare(*args: str) -> Result:
    return CliRunner().invoke(app, ["compare", *args])


def call_here(command: list[str], wait: Callable[[], object]) -> None:
    """A `run_child` that runs the command in this process; no run may fail."""
    result = CliRunner().invoke(app, command[command.index("razorctl") + 1 :])
    assert result.exit_code == 0, result.stderr
    wait()


def write(
    name: str,
    method: str = "full",
    *,
    seed: int = 0,
    accuracies: Sequence[float | None] = (None, 0.5, 0.9),
    saved: int = 1000,
    peak: int | None = None,
    step: float = 1.0,
    device: str = "cpu",
    version: str = razorctl.__version__,
    recipe: dict[str, Any] | None = None,
    compiled: bool = False,
    figure: str = "accuracy",
    other: str | None = None,
    **job: Any,
) -> Path:
    """A run directory as finetune writes it, but without weights.

    figure: the name of the figure that `accuracies` are. other: that of another one, which is half
    of it.
    """
    settings = {"model": "vit-micro", "dataset": "digits", "batch_size": 16, "steps": 3, **job}
    result = {
        "run_dir": name,
        "model": settings["model"],
        "dataset": settings["dataset"],
        "classes": [],
        "recipe": asdict(Recipe(method, **(recipe or {}))),
        "job": asdict(Job(seed=seed, **settings)),
        "steps": len(accuracies),
        "stopped_early": False,
        "out_of_memory": [],
        "metric": figure,
        "accuracy": accuracies[-1],
        "loss": 1.0,
        "split": "test",
        "metrics": figures(accuracies[-1], figure, other),
        "best_metrics": figures(accuracies[-1], figure, other),
        "by_class": None,
        "saved_bytes": saved,
        "full_saved_bytes": 10 * saved,
        "peak_bytes": peak,
        "step_seconds": step,
        "epoch_seconds": 10 * step,
        "device": device,
        "weights": f"{name}/model.safetensors",
        "best_step": len(accuracies),
        "best_accuracy": accuracies[-1],
        "best_weights": f"{name}/model.safetensors",
        "predicted": None,
        "compiled": compiled,
        "payoff": None,
    }
    environment = {"razorctl": version, "torch": "2.99", "date": f"2026-01-0{1 + seed} 10:00 UTC"}
    out = Path(name)
    out.mkdir(parents=True)
    (out / "config.toml").write_text(tomli_w.dumps({"environment": environment}))
    (out / "metrics.jsonl").write_text(metrics(accuracies, step, figure, other))
    (out / "split.json").write_text('{"digests": {}}')
    files = ("metrics.jsonl", "split.json")
    result["checksums"] = {file: documents.size_and_checksum(out / file) for file in files}
    (out / "result.json").write_text(json.dumps(documents.sealed(result)))
    return out


def figures(value: float | None, figure: str, other: str | None) -> dict[str, float | None]:
    """The figures of an evaluation."""
    half = None if value is None else value / 2
    return {figure: value} if other is None else {figure: value, other: half}


def metrics(
    accuracies: Sequence[float | None], seconds: float, figure: str, other: str | None
) -> str:
    """The metrics.jsonl of a run with a figure after each step, or None where none was measured."""
    lines = (
        {
            "step": n,
            "epoch": n / 10,
            "loss": 2 / n,
            "learning_rate": 0.1,
            "grad_norm": 1.0,
            "seconds": seconds,
            "samples_per_second": 16 / seconds,
            "accuracy": each,
            "test_loss": None,
            "metrics": None if each is None else figures(each, figure, other),
        }
        for n, each in enumerate(accuracies, 1)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def assert_refused(result: Result, code: int, sentence: str) -> None:
    """Asserts an exit code and a last line on stderr with a sentence, and nothing on stdout."""
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    *said, last = result.stderr.splitlines()
    assert all(line.endswith(" ...") for line in said)
    assert last.startswith("error: ")
    assert sentence in last
