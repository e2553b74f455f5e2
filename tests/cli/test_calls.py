"""The commands as Python functions, and their results in a notebook."""

import inspect
import json
import pydoc
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
import torch
from torch import nn

import razorctl
from razorctl import Job, Recipe, errors, saved_bytes, sparsify
from razorctl.cli import calls, compare, evaluate, export, finetune, plan, predict, profile
from razorctl.cli import list as listing
from razorctl.cli.views import common as views
from razorctl.config.keywords import TrainingSettings
from razorctl.config.settings import types_in
from razorctl.planning import plan as planner
from razorctl.planning.gpus import load

QUICK = {"batch_size": 16, "steps": 3, "evaluate_every": 3, "device": "cpu"}
COMMANDS = {
    "finetune": finetune.finetune,
    "plan": plan.plan,
    "compare": compare.compare,
    "profile": profile.profile,
    "predict": predict.predict,
    "evaluate": evaluate.evaluate,
    "export": export.export,
    "list": listing.list_names,
}
DATA = {("predict", "files"): "data", ("evaluate", "dataset"): "data"}
SETTINGS = {each.name: each.type for kind in (Job, Recipe) for each in fields(kind)}


def html(result) -> str:
    """Returns the HTML of a result, which must be self-contained."""
    text = result._repr_html_()
    assert not re.search(r'<script|<link|src=(?!"data:)|url\(|https?:', text)
    return text


# Parameters that only say how a command prints, and keywords that no command line can give.
PRINTING = {"json", "csv", "explain", "spreadsheet"}
OF_PYTHON = {"progress", "inputs", "forward", "what"}


def kinds(annotation: Any) -> set[Any]:
    """The types of an annotation; str for all that a command takes as text."""
    types = (get_origin(each) or each for each in types_in(annotation))
    numbers = {int: int, float: float, bool: bool, object: object}
    return {numbers.get(each, str) for each in types} - {object}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a command by the keywords of its function."""
    table = {}
    for parameter in inspect.signature(COMMANDS[name]).parameters.values():
        info = get_args(parameter.annotation)[1] if get_args(parameter.annotation) else None
        if parameter.name not in PRINTING and info is not None:
            flags = [
                each for each in (info.default, *(info.param_decls or ())) if "--" in str(each)
            ]
            keyword = flags[0][2:].replace("-", "_") if flags else parameter.name
            keyword = DATA.get((name, keyword), keyword)
            table[keyword] = parameter
            if flags and parameter.name in SETTINGS:
                table[parameter.name] = parameter
    return table


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_and_the_command_take_the_same(name):
    function, command = getattr(razorctl, name), parameters(name)
    own, settings = calls.types(function)
    assert not own.keys() & settings.keys()
    written = {**own, **settings}
    assert written.keys() - OF_PYTHON == command.keys() - OF_PYTHON
    for keyword in command.keys() - OF_PYTHON:
        plain, info = get_args(command[keyword].annotation)[:2]
        taken = kinds(plain) | ({str} if info.parser else set())
        if not isinstance(written[keyword], str):  # a quoted one also takes a module and its inputs
            assert taken <= kinds(written[keyword]), keyword
            assert taken == kinds(written[keyword]) or str in taken, keyword
        if keyword in own:
            default = inspect.signature(function).parameters[keyword].default
            assert (default or None) == (command[keyword].default or None), keyword
        else:
            assert command[keyword].default is None, keyword
        assert keyword in function.__doc__


def test_the_settings_are_those_of_a_job_and_a_recipe():
    settings = TrainingSettings.__annotations__
    assert settings.keys() == SETTINGS.keys() - {"model", "dataset", "streaming"} | {"lr"}
    for name in settings.keys() - {"lr"}:
        assert kinds(SETTINGS[name]) - {NoneType} <= kinds(settings[name]), name
        assert NoneType in types_in(settings[name]), name


def test_help_lists_every_keyword_with_its_type():
    page = pydoc.render_doc(razorctl.finetune, renderer=pydoc.plaintext)
    assert "recipe: razorctl.config.recipe.Recipe | str | os.PathLike[str] | None = None" in page
    assert re.search(r"\*\*settings: .*razorctl\.config\.keywords\.TrainingSettings", page)
    assert ") -> razorctl.cli.results.Result" in page
    assert re.search(r"^ +label_smoothing: float \| None$", page, re.M)


def test_finetune_trains_and_shows_what_it_found(capsys):
    result = razorctl.finetune("vit-micro", "digits", ratio=0.5, lr=0.1, out="runs/a", **QUICK)
    assert dict(result) == json.loads(Path("runs/a/result.json").read_text())
    assert result["job"]["learning_rate"] == 0.1
    assert result["recipe"]["ratio"] == 0.5
    assert "step 3 of 3" in capsys.readouterr().err
    assert "test accuracy" in str(result)
    shown = html(result)
    assert shown.count("<img") == 1
    assert re.search(r"test accuracy.*0\.\d{4}", shown)
    again = razorctl.finetune(out=Path("runs/a"), resume=True, progress=False)
    assert dict(again) == dict(result)
    assert capsys.readouterr() == ("", "")
    Path("runs/a/metrics.jsonl").unlink()
    assert "<img" not in html(result)


def test_a_plan_is_that_of_the_same_job():
    planned = planner.plan(Job("vit-micro", "digits"), load("t4"))
    by_name = razorctl.plan("vit-micro", Path("digits"), gpu="t4", progress=False)
    assert planned.document()["chosen"] == by_name["chosen"]
    recipe = Recipe("backrazor", 0.5)
    known = razorctl.plan("vit-micro", "digits", recipe=recipe, gpu="t4", progress=False)
    assert Recipe(**known["chosen"]["recipe"]) == recipe
    assert "backrazor" in html(known)


def test_compare_shows_the_plots_of_the_report(runs_here):
    common = {"steps": 2, "batch_size": 16, "device": "cpu", "html": "report.html"}
    methods = ["full", "razor"]
    result = razorctl.compare("vit-micro", "digits", methods=methods, progress=False, **common)
    assert [row["label"] for row in result["rows"]] == methods
    assert html(result).count("<img") == 2
    assert Path("report.html").exists()
    (out,) = Path("runs").iterdir()
    assert razorctl.compare(out)["rows"] == result["rows"]


def test_profile_takes_any_module():
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.zeros(4, 8)
    result = razorctl.profile(model, x, method="backrazor", ratio=0.5, precision="bf16")
    full = saved_bytes(model, x, autocast=torch.bfloat16)
    assert result["totals"]["full_saved_bytes"] == full
    assert [row["type"] for row in result["rows"]] == ["Linear", "GELU", "Linear"]
    assert re.search(r"<td[^>]*>GELU</td>", html(result))
    sparsify(model, Recipe("backrazor", 0.5))
    assert razorctl.profile(model, inputs=x, precision="bf16")["rows"] == result["rows"]
    for given, sentence in (
        ({"steps": 3}, "steps does not apply to a model of your own"),
        ({"batch_size": 3}, "batch size does not apply to a model of your own"),
        ({"ratio": 0.7}, "sparsified by another recipe"),
    ):
        with pytest.raises(errors.UsageError, match=sentence):
            razorctl.profile(model, x, **given)
    with pytest.raises(errors.UsageError, match="neither the name of a model"):
        razorctl.profile(x)
    with pytest.raises(errors.UsageError, match="inputs are for"):
        razorctl.profile("vit-micro", inputs=x)


REFUSED = {
    "keyword": ({"ratoi": 0.5}, "unknown keyword of finetune 'ratoi'; did you mean 'ratio'?"),
    "printing": ({"json": True}, "unknown keyword of finetune 'json'"),
    "nothing": ({"ratoi": None}, "did you mean 'ratio'?"),
    "twice": ({"lr": 0.1, "learning_rate": 0.1}, "learning_rate is given twice"),
    "text": ({"steps": "3"}, "steps '3' is not of type int"),
    "flag": ({"resume": 1}, "resume 1 is not of type bool"),
    "name": ({"device": True}, "device True is not of type str"),
    "resume": ({"resume": True}, "name the directory of the run with --out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_errors_of_one_sentence(case):
    given, sentence = REFUSED[case]
    with pytest.raises(errors.UsageError) as error:
        razorctl.finetune("vit-micro", "digits", **given)
    assert sentence in str(error.value)
    assert len(error.traceback) == 2  # this test, and the function
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: razorctl.plan("bert-base", "digits", gpu="t4"), errors.UsageError),
        (lambda: razorctl.compare("vit-micro"), errors.UsageError),
        (lambda: razorctl.finetune(Job("vit-micro", "digits")), errors.UsageError),
        (lambda: razorctl.compare("vit-micro", "digits", method="full"), errors.UsageError),
        (lambda: razorctl.profile("vit-mikro"), errors.UsageError),
        (lambda: razorctl.finetune("vit-micro", "hf:nobody/nothing"), errors.MissingError),
    ],
)
def test_errors_are_those_of_the_command(call, kind):
    with pytest.raises(kind):
        call()
    assert not views.err.quiet


def test_what_does_not_fit_says_the_least_that_does():
    small = {"vram": "0.1GB", "batch_size": 1, "method": "full"}
    for call in (razorctl.plan, razorctl.finetune):
        with pytest.raises(errors.NoFitError, match=r"in 102 MiB; it needs at least \d+ MiB, so"):
            call("vit-micro", "digits", **small)
    assert not Path("runs").exists()


def test_a_refused_call_loads_no_torch():
    code = (
        "import sys, razorctl\n"
        "assert 'rich' not in sys.modules and 'typer' not in sys.modules\n"
        "try: razorctl.finetune('vit-micro', 'digits', ratio=2)\n"
        "except razorctl.errors.UsageError: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
