import json
import math
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.training.run import Run, finetune
from tests.models import altered

# Those whose runs differ; tests of surgery have every method.
RUN = ("full", "checkpoint", "head", "lora", "torchao-int8", "razor", "prebackrazor++")
DENSE = ("full", "lora", "torchao-int8")  # an adapter's gradient needs the whole input too
WHOLE = (*DENSE, "bias", "head")  # what freezes weights has none to draw, nor has torchao
JOB = Job("vit-micro", "digits", batch_size=32, steps=3, evaluate_every=2)
SPARSE = Recipe("backrazor")
KEYS = [
    *("run_dir", "model", "dataset", "classes", "recipe", "job", "steps", "stopped_early"),
    *("out_of_memory", "metric", "accuracy", "loss", "split", "metrics", "saved_bytes"),
    *("full_saved_bytes", "peak_bytes", "step_seconds", "epoch_seconds", "device"),
    *("weights", "best_step", "best_accuracy", "best_weights", "best_metrics", "by_class"),
    *("predicted", "compiled", "payoff", "checksums", "digest"),
]


pytestmark = pytest.mark.usefixtures("shallow")


def train(out: Path, job: Job = JOB, recipe: Recipe | None = None) -> Run:
    run = finetune(job, recipe, out=out / "run", device="cpu")
    assert len(list(run)) == run.job.steps
    return run


@pytest.mark.parametrize("method", RUN)
def test_methods_train_and_leaves_a_complete_run(method, tmp_path):
    run = train(tmp_path, recipe=Recipe(method, 0.5, 1 if method in WHOLE else 0.5))
    result = run.result()
    assert list(result) == KEYS
    assert result["steps"] == 3
    assert result["peak_bytes"] is None  # measured on CUDA alone
    assert 0 <= result["accuracy"] <= 1
    assert result["step_seconds"] > 0
    part = result["saved_bytes"] / result["full_saved_bytes"]
    assert 0.9 < part <= 1 if method in DENSE else 0 < part < 1

    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["accuracy"] is not None for line in lines] == [False, True, True]
    assert lines[-1]["accuracy"] == result["accuracy"]
    assert all(math.isfinite(line["loss"]) for line in lines)
    last = result["accuracy"] >= lines[1]["accuracy"]
    assert {file.name for file in (tmp_path / "run").iterdir()} == {
        "config.json",
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "result.json",
        "split.json",
        *([] if last else ["last"]),
        *(["adapter"] if method == "lora" else []),
    }
    assert json.loads((tmp_path / "run/result.json").read_text()) == result


@pytest.mark.parametrize("method", ["full", "razor"])
def test_the_adapters_of_a_run_load_by_peft(method, tmp_path):
    run = train(tmp_path, recipe=Recipe(method, 0.5, lora=True))
    base = PeftModel.from_pretrained(run_of_seed(0), str(tmp_path / "run/adapter"))
    run.model = base.merge_and_unload()
    assert run.evaluate()["accuracy"] == run.result()["best_metrics"]["accuracy"]


def run_of_seed(seed):
    """The model with which a run of that seed begins."""
    torch.manual_seed(seed)
    return models.find("vit-micro").build(10)


def test_the_written_config_repeats_the_run_exactly(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    recipe = Recipe("prebackrazor", 0.8, joint_budget=0.5, seed=3)
    train(tmp_path / "a", Job("vit-micro", "digits", batch_size=32, epochs=0.06, seed=3), recipe)
    config = tomllib.loads((tmp_path / "a/run/config.toml").read_text())
    torch.manual_seed(123)
    train(tmp_path / "b", Job(**config["job"]), Recipe(**config["recipe"]))
    first, second = (load_file(tmp_path / d / "run/model.safetensors") for d in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_epoch_shows_each_example_once_in_a_new_order(tmp_path):
    job = Job("vit-micro", "digits", batch_size=479)
    run = finetune(job, SPARSE, out=tmp_path / "run", device="cpu")
    batches = run.feed.loading.batches()
    first, second = (
        [x.numpy().tobytes() for _ in range(3) for x in next(next(batches))["inputs"]] for _ in "ab"
    )
    assert first != second
    assert sorted(first) == sorted(second)


class Odd(nn.Conv1d):
    """A layer of a type that no method swaps."""


def register(monkeypatch, build) -> None:
    micro = models.find("vit-micro")
    odd = altered(
        micro,
        name="odd",
        build=build,
        bare=micro.bare,
        transform=lambda _, size: micro.transform(micro.build(2)),
        example=lambda _, rows, size: torch.zeros(rows, 1, 28, 28),
    )
    monkeypatch.setitem(models.models(), "odd", models.ModelEntry.single(odd))


def test_a_model_that_cannot_be_pruned_leaves_nothing_behind(tmp_path, monkeypatch):
    register(
        monkeypatch,
        lambda classes, _: nn.Sequential(nn.Flatten(2), Odd(1, classes, 784), nn.Flatten()),
    )
    with pytest.raises(UsageError, match="no layer of Sequential can be pruned"):
        finetune(Job("odd", "digits"), Recipe("backrazor"), out=tmp_path / "new" / "run")
    assert not list(tmp_path.iterdir())


def test_what_is_done_before_the_first_step_is_told_to_who_asks(tmp_path, capfd):
    told = []
    finetune(JOB, SPARSE, out=tmp_path / "run", device="cpu", progress=told.append)
    assert told == ["loading digits", "building vit-micro", "tracing what a step stores"]
    assert capfd.readouterr() == ("", "")


def test_a_directory_is_claimed_first_and_given_back_alone(tmp_path):
    out = tmp_path / "runs" / "run"

    def progress(_: str) -> None:
        assert out.exists()
        (tmp_path / "runs" / "another").mkdir(exist_ok=True)  # a run that began meanwhile

    with pytest.raises(UsageError, match="larger than"):
        finetune(replace(JOB, batch_size=1438), out=out, device="cpu", progress=progress)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["another"]


def test_weights_can_be_read_by_whom_the_rest_can(tmp_path):
    before = os.umask(0o027)
    try:
        train(tmp_path, replace(JOB, steps=1), SPARSE)
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "run").iterdir()}
    assert modes == {0o640}


def test_names_that_are_not_utf8_are_refused(tmp_path):
    odd = tmp_path / os.fsdecode(b"n\xff")
    with pytest.raises(UsageError, match=r"cannot write \S*n\? \(its name is not UTF-8\); name"):
        finetune(JOB, out=odd, device="cpu")
    odd.mkdir()
    with pytest.raises(UsageError, match=r"the name of \S*n\? is not UTF-8; rename it"):
        finetune(replace(JOB, model=str(odd)), out=tmp_path / "run", device="cpu")


@pytest.mark.parametrize("evaluate_every", [2, 3])
def test_a_last_evaluation_that_failed_is_made_when_the_run_goes_on(evaluate_every, tmp_path):
    job = replace(JOB, evaluate_every=evaluate_every)
    whole = train(tmp_path / "whole", job).result()
    run, right, left = finetune(job, out=tmp_path / "run", device="cpu"), Run.evaluation, [1]

    def evaluation(run, rows=None):
        if len(run.history) == 2 and left.pop():
            raise OSError(24, "Too many open files")
        return right(run, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluation", evaluation)
        with pytest.raises(OSError, match="Too many"):
            list(run)
    resumed = finetune(job, out=tmp_path / "run", device="cpu", resume=True)
    assert list(resumed) == []
    result = resumed.result()
    assert result["metrics"] == whole["metrics"]
    assert result["by_class"] == whole["by_class"]
    last = (tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["metrics"] == whole["metrics"]


def test_what_lives_as_long_as_a_run_is_hidden_from_collections_once(tmp_path, monkeypatch):
    gc = Mock(**{"get_freeze_count.return_value": 0})
    monkeypatch.setattr("razorctl.training.run.gc", gc)
    train(tmp_path)
    calls = [name for name, *_ in gc.method_calls]
    assert calls == ["get_freeze_count", "collect", "freeze", "unfreeze"]


def test_epochs_are_cut_alike_whatever_the_micro_batches(tmp_path):
    job = Job("vit-micro", "digits", batch_size=100, accumulate=5)
    run = finetune(job, SPARSE, out=tmp_path / "run", device="cpu")
    steps = [[len(rows["labels"]) for rows in next(run.feed.loading.batches())] for _ in range(2)]
    assert run.steps_per_epoch == 14
    assert steps == [[20] * 5] * 2


@pytest.mark.parametrize(("method", "optimizer"), [("full", "sgd"), ("backrazor", "adamw")])
def test_mixed_precision_on_a_cpu(method, optimizer, tmp_path):
    job = replace(JOB, precision="bf16", optimizer=optimizer, learning_rate=1e-3, weight_decay=0.01)
    run = train(tmp_path, job, Recipe(method))
    assert run.job.precision == "bf16"
    assert run.result()["job"]["optimizer"] == optimizer
    single = finetune(JOB, Recipe(method), out=tmp_path / "fp32")
    assert single.job.precision == "fp32"
    assert run.full_saved_bytes < single.full_saved_bytes
    assert all(p.dtype == torch.float32 for p in run.model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16"}, "fp16 cannot be trained on cpu"),
        ({"accumulate": 5}, "batch size 32 cannot be split into 5 equal micro-batches"),
        ({"accumulate": 0}, "accumulate 0 is not a positive number"),
    ],
)
def test_steps_that_cannot_be_taken(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        finetune(replace(JOB, **settings), out=tmp_path / "run", device="cpu")
    assert not list(tmp_path.iterdir())
