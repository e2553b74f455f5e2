"""Which command takes which settings, and how a shell completes their names."""

from dataclasses import fields
from inspect import getdoc

import pytest
from typer.testing import CliRunner

from razorctl.cli.app import COMMANDS, app, loaded
from razorctl.job import Job
from razorctl.methods import METHODS
from razorctl.recipe import Recipe


def _options(command: str) -> set[str]:
    return {option.name for option in loaded(command).params}


def test_what_is_planned_profiled_and_run_takes_every_setting():
    recipe = {field.name for field in fields(Recipe)} - {"seed"}
    for command in ("plan", "profile", "finetune"):
        assert recipe <= _options(command)
    job = {field.name for field in fields(Job)}
    assert job <= _options("finetune")
    assert job - {"accumulate"} <= _options("plan")  # which chooses that
    assert {"batch_size", "input_size", "precision", "optimizer"} <= _options("profile")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_all_commands_is_the_first_line_of_each(name):
    first = getdoc(loaded(name).callback).partition("\n\n")[0]
    assert first.replace("\n", " ") == COMMANDS[name]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("finetune vit-m", {"vit-micro"}),
        ("plan vit-micro cifar", {"cifar10", "cifar100"}),
        ("profile vit-micro --method prebackrazor", {m for m in METHODS if m.startswith("preb")}),
        ("plan --gpu rtx-20", {"rtx-2080-ti"}),
        ("finetune --recipe sheared-tab1-j", {"sheared-tab1-js50", "sheared-tab1-js70"}),
    ],
)
def test_a_shell_completes_names(typed, offered):
    asked = {
        "_RAZORCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"razorctl {typed}",
        "COMP_CWORD": str(len(typed.split())),
    }
    result = CliRunner().invoke(app, [], prog_name="razorctl", env=asked)
    assert set(result.stdout.split()) == offered
