"""Options: which command takes which, their help, their variables, and their completion."""

import io
import re
from dataclasses import fields
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from razorctl.cli.app import COMMANDS, app, loaded
from razorctl.cli.options import PLANS
from razorctl.cli.views import common as views
from razorctl.cli.views.terminal import CleanConsole
from razorctl.config.job import Job
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.methods import METHODS
from razorctl.planning.candidates import KEPT_BY_GRAPHS
from razorctl.training.trackers import TRACKERS
from razorctl.units import percent
from tests.cli.commands import razorctl


def _options(command: str) -> set[str]:
    return {option.name for option in loaded(command).params}


def test_what_is_planned_profiled_and_run_takes_every_setting():
    recipe = {field.name for field in fields(Recipe)} - {"seed"}
    for command in ("plan", "profile", "finetune"):
        assert recipe <= _options(command)
    job = {field.name for field in fields(Job)} - {"streaming"}  # of directories alone
    assert job <= _options("finetune")
    assert job - {"accumulate"} <= _options("plan")  # which chooses that
    assert {"batch_size", "input_size", "precision", "optimizer"} <= _options("profile")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_all_commands_is_the_first_line_of_each(name):
    first = getdoc(loaded(name).callback).partition("\n\n")[0]
    assert first.replace("\n", " ") == COMMANDS[name]


def panels(page: str) -> dict[str, list[str]]:
    """The lines in each panel of a help page, by the name of the panel."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if line.startswith("╭"):
            name = line.strip("╭─╮ ")
            found[name] = []
        elif line.startswith("│"):
            found[name].append(line[2:-2].rstrip())
    return found


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_of_help(name, width, monkeypatch):
    """Help has a summary, an example unless there are no arguments, and readable panels."""
    monkeypatch.setenv("COLUMNS", str(width))
    result = razorctl(name, "--help")
    page = result.stdout
    assert (result.exit_code, result.stderr) == (0, "")
    assert not re.search(r"<|\b(INTEGER|TEXT|FLOAT|PATH|RANGE|BOOLEAN)\b|\(s\)", page)
    assert not re.search(r"\[(model|dataset|kind|run)\]", page)
    arguments = [each for each in loaded(name).params if each.param_type_name == "argument"]
    example = f"    razorctl {name} "
    if "MODEL" in page or "RUN" in page:
        assert page.index(example) < page.index("╭")
    lines = [line for line in page.splitlines() if not line.startswith(example)]
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)
    found = panels(page)
    assert list(found)[: 1 + bool(arguments)] == ["Arguments"] * bool(arguments) + ["Options"]
    for panel, shown in found.items():
        flags = [line for line in shown if line.startswith("-")]
        assert len(flags) <= 12, panel
        words = " ".join(" ".join(shown).split())
        told = "list defaults" in words
        assert told == ("[default: by model]" in words), panel


def test_a_terminal_has_flags_in_color_and_what_they_mean_without(monkeypatch):
    shown = io.StringIO()
    terminal = CleanConsole(file=shown, force_terminal=True, width=80, color_system="standard")
    monkeypatch.setattr(views, "out", terminal)
    razorctl("finetune", "--help")
    flag, kind, dim, end = "\x1b[1;36m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
    typed, default = f"{flag}--steps{end}{kind} N{end}", f"{dim}[default: by model]{end}"
    assert re.search(
        re.escape(typed) + " +Optimizer steps. " + re.escape(default), shown.getvalue()
    )


def options(name: str) -> dict[str, Any]:
    """The options of a command by their flags."""
    options = (each for each in loaded(name).params if each.param_type_name == "option")
    return {option.opts[0]: option for option in options}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_says_what_it_takes_and_its_default(name):
    for flag, option in options(name).items():
        switch = option.type_descriptor.annotation is bool
        assert option.help, flag
        assert (option.metavar == "") == switch, flag
        assert switch or re.fullmatch(r"[A-Z]+|\[\S+(\|\S+)+\]", option.metavar), flag
        off = switch and not option.secondary_opts  # which is off where it is not given
        told = option.default is not None or re.search(r"\[default: .+\]$", option.help)
        assert off or told, flag


def test_choices_are_those_that_there_are():
    prefer = get_args(PLANS["prefer"])[1].metavar
    assert set(prefer.strip("[]").split("|")) == set(get_args(Prefer))
    (tracker,) = (each for each in loaded("finetune").params if each.name == "tracker")
    assert set(tracker.metavar.strip("[]").split("|")) == set(TRACKERS)


VALUES = {int: ("3", 3), float: ("0.5", 0.5), bool: ("1", True), str: ("word", "word")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_variable_sets_every_option(name, monkeypatch):
    """The variable is RAZORCTL_ with the name of the flag, as in RAZORCTL_LR."""
    required = ["word" for each in loaded(name).params if each.required]
    for flag, option in options(name).items():
        kind = option.type_descriptor.annotation
        text, value = VALUES.get(kind, ("word", "word"))
        if kind == list[str]:
            value = ["word"]
        elif option.name == "batch_size" and kind is not int:
            text, value = "auto", "auto"
        variable = flag.removeprefix("--").replace("-", "_").upper()
        with monkeypatch.context() as patch:
            patch.setenv(f"RAZORCTL_{variable}", text)
            context = loaded(name).make_context(name, required.copy())
        found = context.params[option.name]
        assert (str(found) if isinstance(found, Path) else found) == value, flag
        assert context.get_parameter_source(option.name).name == "ENVIRONMENT", flag


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("finetune vit-m", {"vit-micro"}),
        ("plan vit-micro cifar", {"cifar10", "cifar100"}),
        ("profile vit-micro --method prebackrazor", {m for m in METHODS if m.startswith("preb")}),
        ("plan --gpu rtx-2080", {"rtx-2080", "rtx-2080-super", "rtx-2080-ti"}),
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


def test_help_has_the_memory_of_cuda_graphs_that_plans_count():
    (option,) = (each for each in loaded("plan").params if each.name == "cuda_graphs")
    assert f"up to {percent(KEPT_BY_GRAPHS)} of the peak" in option.help
