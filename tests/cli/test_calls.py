"""The commands as Python functions, and their results in a notebook."""

import inspect
import json
import re
import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import razorctl
from razorctl import Job, Recipe, errors, saved_bytes, sparsify
from razorctl.cli import calls, compare, finetune, plan, profile
from razorctl.cli.views import common as views
from razorctl.planning.gpus import load
from razorctl.units import size

QUICK = {"batch_size": 16, "steps": 3, "evaluate_every": 3, "device": "cpu"}
COMMANDS = {
    "finetune": finetune.finetune,
    "plan": plan.plan,
    "compare": compare.compare,
    "profile": profile.profile,
}


def html(result) -> str:
    """Returns the HTML of a result, which must be self-contained."""
    text = result._repr_html_()
    assert not re.search(r'<script|<link|src=(?!"data:)|url\(|https?:', text)
    return text


@pytest.mark.parametrize("name", COMMANDS)
def test_keywords_are_the_options(name):
    app = typer.Typer(add_completion=False)
    app.command()(COMMANDS[name])
    function = getattr(razorctl, name)
    shown = inspect.signature(function).parameters
    for option in typer.main.get_command(app).params:
        if option.name in calls.PRINTING:
            continue
        flags = [flag for flag in option.opts if flag.startswith("--")]
        for keyword in [flag[2:].replace("-", "_") for flag in flags] or [option.name]:
            assert keyword in shown, keyword
            assert keyword in function.__doc__


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


def test_objects_are_taken_as_before():
    run = razorctl.finetune(Job("vit-micro", "digits", 16, 1), Recipe("full"), device="cpu")
    assert [step.step for step in run] == [1]
    planned = razorctl.plan(Job("vit-micro", "digits"), load("t4"))
    by_name = razorctl.plan("vit-micro", "digits", gpu="t4", progress=False)
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


def test_profile_takes_a_name():
    quick = {"batch_size": 4, "steps": 1, "device": "cpu"}
    result = razorctl.profile("vit-micro", "digits", ratio=0.8, **quick)
    assert (result["recipe"]["ratio"], result["dataset"]) == (0.8, "digits")
    assert result["steps"] == 1
    assert "blocks.*.attn.qkv" in html(result)
    assert "blocks.*.attn.qkv" in str(result)


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
    "value": ({"ratio": 1}, "ratio 1 is outside [0, 1)"),
    "method": ({"method": "razr"}, "did you mean 'razor'?"),
    "resume": ({"resume": True}, "name the directory of the run with --out"),
    "auto": ({"batch_size": "auto", "device": "cpu"}, "batch size auto needs a plan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_errors_of_one_sentence(case):
    given, sentence = REFUSED[case]
    with pytest.raises(errors.UsageError) as error:
        razorctl.finetune("vit-micro", "digits", **given)
    assert sentence in str(error.value)
    assert len(error.traceback) == 3  # this test, the function, and what it calls
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: razorctl.plan("bert-base", "digits", gpu="t4"), errors.UsageError),
        (lambda: razorctl.compare("vit-micro"), errors.UsageError),
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
        with pytest.raises(errors.NoFitError) as error:
            call("vit-micro", "digits", **small)
        assert str(error.value) == (
            "vit-micro on digits does not fit in 102 MiB; it needs at least "
            f"{size(error.value.needed, ceil)}, so choose a smaller model, or a card with as much "
            "memory."
        )
    assert not Path("runs").exists()


def test_a_refused_call_loads_no_torch():
    code = (
        "import sys, razorctl\n"
        "assert 'rich' not in sys.modules and 'typer' not in sys.modules\n"
        "try: razorctl.finetune('vit-micro', 'digits', ratio=2)\n"
        "except razorctl.cli.calls.UsageError: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
