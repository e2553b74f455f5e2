"""Notes about settings without effect, compared with what sparsify does."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from typer.testing import Result

from razorctl.cli.effects import without_effect
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.layers.kinds.linear import Linear
from razorctl.methods import METHODS
from razorctl.models import find
from razorctl.surgery import sparsify as surgery
from razorctl.training import run as trainer
from tests.cli.commands import finetune, razorctl

GIVEN = {
    "ratio": 0.8,
    "unbiased": True,
    "mean_correction": True,
    "int8_weight_grad": True,
    "int8_input_grad": True,
    "int8_forward": True,
}


def state(thing: Any) -> Any:
    """The arguments that a rule was built from."""
    if isinstance(thing, Tensor) or not hasattr(thing, "__dict__"):
        return str(thing)
    return type(thing).__name__, {name: state(value) for name, value in vars(thing).items()}


@pytest.fixture(scope="module")
def vit():
    return find("vit-micro").build(10)


@pytest.mark.parametrize("setting", GIVEN)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_said_to_do_nothing_does_nothing(method, setting, vit):
    def done(recipe: Recipe) -> Any:
        chosen = surgery._choose(vit, recipe)
        linear = any(swap.razor is Linear for swap in chosen)
        # `int8` is what every linear layer that is swapped gets.
        gemms = (recipe.int8_weight_grad, recipe.int8_input_grad, recipe.int8_forward)
        rules = [(swap.name, state(swap.rules)) for swap in chosen]
        return rules, gemms if linear else None

    plain = Recipe(method)
    recipe = replace(plain, **{setting: GIVEN[setting]})
    assert bool(without_effect([setting], recipe)) == (done(recipe) == done(plain))
    assert without_effect([], recipe) == []


@pytest.mark.parametrize(
    ("name", "method"), [("activation_checkpointing", "checkpoint"), ("lora", "lora")]
)
def test_what_a_method_does_already_adds_nothing(name, method):
    for other in ("full", "razor"):
        assert without_effect([name], Recipe(other, **{name: True})) == []
    (note,) = without_effect([name], Recipe(method, **{name: True}))
    assert note == f"{name.replace('_', ' ')} adds nothing to method {method}."


def test_a_joint_budget_gives_these_something_to_do():
    recipe = Recipe("full", joint="branches", unbiased=True)
    assert len(without_effect(["joint", "unbiased"], recipe)) == 2
    assert without_effect(["joint", "unbiased"], replace(recipe, joint_budget=0.5)) == []


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("momentum", {"momentum": 0.5}, None),
        ("momentum", {"momentum": 0.5, "optimizer": "adamw"}, "adamw does not use it"),
        ("warmup_steps", {"warmup_steps": 9, "steps": 10}, None),
        ("warmup_steps", {"warmup_steps": 10, "steps": 10}, "the warmup takes 10 steps"),
        ("warmup_steps", {"warmup_steps": 10}, None),  # the steps are the model's, or epochs
    ],
)
def test_of_a_job(name, settings, word):
    found = without_effect([name], Job("m", "d", **settings))
    assert [word in sentence for sentence in found] == ([] if word is None else [True])


DONE = SimpleNamespace(result=dict)


class TestNotes:
    """The notes that commands print about settings without effect."""

    def notes(self, result: Result) -> list[str]:
        assert result.exit_code == 0, result.stderr
        return [line for line in result.stderr.splitlines() if line.startswith("note: ")]

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        """Trains nothing."""
        monkeypatch.setattr("razorctl.cli.progress.train", lambda *_: DONE)

    def test_a_flag_a_variable_and_a_line_of_a_file(self, monkeypatch):
        Path("razorctl.toml").write_text("[recipe]\nmethod = 'full'\njoint = 'branches'\n")
        monkeypatch.setenv("RAZORCTL_RATIO", "0.9")
        assert self.notes(finetune("--unbiased", "--json")) == [
            "note: the ratio does nothing: method full has no ratio.",
            "note: joint branches does nothing without a joint budget below 1.",
            "note: unbiased does nothing: method full samples nothing.",
        ]

    def test_a_default_is_not_given(self):
        Path("razorctl.toml").write_text("[recipe]\nmethod = 'full'\nratio = 0.9\n")
        assert self.notes(finetune("--json")) == []

    def test_a_warmup_longer_than_the_steps_that_are_the_models(self, monkeypatch):
        steps = Job("vit-micro", "digits", warmup_steps=2000).resolved({"steps": 300}, 99)
        monkeypatch.setattr(trainer, "finetune", lambda *_, **__: SimpleNamespace(job=steps))
        monkeypatch.setattr(
            "razorctl.cli.progress.train", lambda prepare, *_: prepare(print) and DONE
        )
        result = razorctl("finetune", "vit-micro", "digits", "--warmup-steps", "2000", "--json")
        (note,) = self.notes(result)
        assert note.endswith("the warmup takes 2,000 steps, and the run has 300.")

    def test_a_variable_that_nothing_reads(self, monkeypatch):
        monkeypatch.setenv("RAZORCTL_RATOI", "0.5")
        monkeypatch.setenv("RAZORCTL_SEEDS", "2")  # of another command
        monkeypatch.setenv("RAZORCTL_KERNELS", "torch")  # of no command
        assert self.notes(finetune("--json")) == [
            "note: RAZORCTL_RATOI does nothing: unknown setting 'ratoi'; did you mean 'ratio'?"
        ]
