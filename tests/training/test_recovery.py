"""Steps that run out of memory are taken again with less of it."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from razorctl.cli.app import app
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.surgery.sparsify import recipe_of
from razorctl.training import learner
from razorctl.training.recovery import Recovery, Relief, parted, reliefs
from tests.training.runs import FULL, JOB, begin, resume, same, stop

pytestmark = pytest.mark.usefixtures("shallow")
SMALL = replace(JOB, steps=3, save_every=None, warmup_steps=0)
RAZOR = Recipe("razor", 0.5)


@pytest.fixture
def memory(monkeypatch):
    """Makes steps run out of memory, after their first backward pass, where `lacks` says so."""

    def lacking(lacks):
        step = learner.train_step

        def train_step(model, logits, micro_batches, *rest, **options):
            def watched():
                for inputs, labels in micro_batches:
                    torch.rand(3)  # what a repeated step must not draw on
                    yield inputs, labels
                    if lacks(model, len(labels)):
                        raise torch.OutOfMemoryError

            return step(model, logits, watched(), *rest, **options)

        monkeypatch.setattr(learner, "train_step", train_step)

    return lacking


def ended(out, job=SMALL, recipe=FULL):
    run = begin(out, job, recipe)
    for _ in run:
        pass
    return run


def test_smaller_micro_batches_give_the_same_weights(tmp_path, memory, caplog):
    ended(tmp_path / "small", replace(SMALL, accumulate=4))
    memory(lambda _, rows: rows > 2)
    run = ended(tmp_path / "run")
    assert same(tmp_path / "small/model.safetensors", tmp_path / "run/model.safetensors")
    assert run.result()["out_of_memory"] == [
        {"step": 1, "parts": parts, "ratio": None, "joint_budget": None, "captured": False}
        for parts in (2, 4)
    ]
    assert "out of memory at step 1; from now on, steps run in micro-batches of 4" in caplog.text


class Cycle:
    def __init__(self):
        self.itself = self


def test_garbage_is_freed_before_a_step_is_taken_again(tmp_path, memory, monkeypatch):
    """Also objects that lived when the run hid its objects from garbage collections."""
    held = [Cycle()]
    garbage, alive = weakref.ref(held[0]), []

    def lacks(*_):
        if held:  # the first step
            return False
        alive.append(garbage() is not None)
        return len(alive) == 1

    memory(lacks)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    run = begin(tmp_path / "run", SMALL, steps=1)
    held.clear()
    gc.disable()
    try:
        next(run)
    finally:
        gc.enable()
        gc.freeze()  # as tests.conftest does
    assert alive == [True, *[False] * (len(alive) - 1)]
    assert len(alive) > 1


def test_then_the_ratio_rises_and_the_joint_budget_falls(tmp_path, memory):
    memory(lambda model, _: recipe_of(model) != replace(RAZOR, ratio=0.9, joint_budget=0.25))
    run = ended(tmp_path / "run", replace(SMALL, max_ratio=0.9), RAZOR)
    assert len(run.history) == 3
    steps, *changes = zip(*(e.values() for e in run.result()["out_of_memory"]), strict=True)
    assert set(steps) == {1}
    assert list(zip(*changes, strict=True)) == [
        *((parts, None, None, False) for parts in (2, 4, 8)),
        *((8, ratio, None, False) for ratio in (0.75, 0.9)),
        *((8, 0.9, budget, False) for budget in (0.5, 0.25)),
    ]
    assert run.recipe == RAZOR  # as it was started


def test_a_resumed_run_goes_on_with_less(tmp_path, memory):
    memory(lambda model, rows: rows > 1 or recipe_of(model).ratio < 0.75)
    once = ended(tmp_path / "once", SMALL, RAZOR)
    first = begin(tmp_path / "run", SMALL, RAZOR, steps=2)
    first.save()
    stop(first)
    again = resume(tmp_path / "run", SMALL, RAZOR)
    assert (recipe_of(again.model).ratio, again.learner.parts) == (0.75, 8)
    list(again)
    assert same(tmp_path / "once/model.safetensors", tmp_path / "run/model.safetensors")
    assert again.recovery.relieved == once.recovery.relieved


def test_what_is_strict_ends_with_what_is_saved(tmp_path, memory):
    memory(lambda *_: True)
    run = begin(tmp_path / "run", replace(SMALL, strict=True))
    with pytest.raises(torch.OutOfMemoryError):
        next(run)
    assert run.checkpoints.newest.step == 0
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing left to change
        ended(tmp_path / "other")


def test_a_step_that_changed_weights_is_not_repeated(tmp_path, monkeypatch):
    run = begin(tmp_path / "run", SMALL)

    def torn(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(run.learner.optimizer, "step", torn)
    with pytest.raises(torch.OutOfMemoryError):
        next(run)
    assert run.checkpoints.newest is None
    assert run.recovery.relieved == []


def test_packed_micro_batches_have_as_many_parts_as_rows_allow():
    batch = {"ids": torch.arange(10).view(5, 2)}, torch.arange(5)
    for parts, sizes in ((2, [3, 2]), (4, [2, 2, 1]), (8, [1] * 5)):
        made = [*parted(batch, parts)]
        assert [len(labels) for _, labels in made] == sizes
        assert torch.cat([inputs["ids"] for inputs, _ in made]).equal(batch[0]["ids"])


def test_what_a_run_may_change():
    job = SMALL.resolved({}, 100)
    assert list(reliefs(replace(job, processes=2), RAZOR)) == []
    assert [r.ratio for r in reliefs(job, RAZOR) if r.ratio][-1] == job.max_ratio
    within = reliefs(replace(job, optimizer_in_backward=True), RAZOR)
    assert {relief.parts for relief in within} == {1}
    adapted = reliefs(job, Recipe(ratio=0.5, lora=True))
    fixed = {*reliefs(job, Recipe("lora")), *adapted, *reliefs(replace(job, compile=True), FULL)}
    assert fixed == {Relief(2), Relief(4), Relief(8)}


def test_a_change_that_the_model_cannot_take_is_passed_over():
    def sparsify(recipe):
        if recipe.ratio > 0.5:
            raise UsageError("cannot be met")

    recovery = Recovery(replace(SMALL.resolved({}, 100), batch_size=1), RAZOR)
    assert recovery.relieve(7, lambda _: None)
    assert recovery.relief == Relief(1, 0.75)
    assert not Recovery(replace(recovery.job, compile=True), RAZOR).relieve(7, sparsify)


def test_the_command_says_what_it_changed(tmp_path, memory, monkeypatch, caplog):
    memory(lambda _, rows: rows > 4)
    args = ["finetune", "vit-micro", "digits", "--steps", "2", "--batch-size", "8", "--device"]
    args += ["cpu", "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert "steps run in micro-batches of 4" in caplog.text
    args[-1] = str(tmp_path / "strict")
    result = CliRunner().invoke(app, [*args, "--strict"])
    assert result.exit_code == 4
    assert "out of memory" in result.stderr
