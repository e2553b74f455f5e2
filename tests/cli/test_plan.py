"""`plan`, and `finetune` by a plan, as a user meets them."""

import json
import os
import re
import shlex
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner, Result

from razorctl import devices
from razorctl.cli import planning
from razorctl.cli.settings import Settings
from razorctl.cli.app import app
from razorctl.config import presets
from razorctl.config.settings import read_toml
from razorctl.job import Job
from razorctl.planning import gpus
from razorctl.planning import plan as planner
from razorctl.planning.gpus import Detected, Process
from razorctl.recipe import Recipe
from razorctl.training import run as trainer

SMALL = ["vit-micro", "digits", "--batch-size", "1024"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("RAZORCTL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "traces"))


def razorctl(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def test_the_table_marks_the_choice_and_ends_with_the_command():
    result = razorctl("plan", *SMALL, "--gpu", "rtx-2080-ti")
    assert result.exit_code == 0, result.stderr
    assert "NVIDIA GeForce RTX 2080 Ti, 11.00 GiB" in " ".join(result.stdout.split())
    assert "> full" in result.stdout
    assert "All predicted. " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("razorctl finetune vit-micro digits ")
    assert "--precision fp16" in result.stdout.splitlines()[-1]
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[:-1])


def test_explain_says_what_was_tried():
    result = razorctl("plan", *SMALL, "--gpu", "t4", "--vram", "1GB", "--explain")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if re.match(r"\d+\. ", line)]
    assert lines[0].startswith("1. full: needs ")
    assert any("too slow" in line for line in lines)
    assert lines[-1].endswith(": taken.")


def test_json_is_one_document_and_nothing_else():
    result = razorctl("plan", *SMALL, "--vram", "11GB", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["fits"] is True
    assert document["gpu"]["name"] == "NVIDIA GeForce RTX 2080 Ti"
    assert document["budget_bytes"] == 11 * 2**30
    assert result.stderr == ""


def test_a_seed_is_no_recipe(tmp_path):
    (tmp_path / "razorctl.toml").write_text("[job]\nseed = 3\n")
    document = json.loads(razorctl("plan", *SMALL, "--gpu", "t4", "--json").stdout)
    assert document["chosen"]["method"] == "full"
    assert document["job"]["seed"] == 3


def test_what_does_not_fit():
    result = razorctl("plan", *SMALL, "--gpu", "t4", "--vram", "640MB", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["fits"] is False
    assert document["needed_bytes"] > document["budget_bytes"] == 640 * 2**20
    assert "does not fit in 0.62 GiB; it needs 0." in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--vram", "11XB"], "'11XB' is not a size of memory; write one like 11GB"),
        (["--vram", "0"], "'0' is not a size of memory"),
        (["--vram", "0GB"], "'0GB' is not a size of memory"),
        (["--vram", "-3GB"], "'-3GB' is not a size of memory"),
        (["--vram", "inf"], "'inf' is not a size of memory"),
        (["--gpu", "rtx-4091"], "did you mean 'rtx-4090'?"),
        (["--gpu", "t4", "--vram", "40GB"], "has 15.0 GiB; ask for no more than that."),
        ([], "no GPU was found; name one with --gpu, or its memory with --vram."),
        (["--gpu", "none.toml"], "cannot read none.toml"),
        (["--gpu", "t4", "--prefer", "quick"], "unknown preference 'quick'"),
        (["--gpu", "t4", "--max-ratio", "2"], "largest ratio 2.0 is outside [0, 1)"),
        (["--gpu", "t4", "--precision", "bf16"], "needs compute capability 8.0"),
        (["--gpu", "t4", "--method", "razr"], "did you mean 'razor'?"),
    ],
)
def test_bad_input_is_one_sentence(args, message, monkeypatch):
    monkeypatch.setattr(gpus, "detect", lambda: ())
    result = razorctl("plan", *SMALL, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_the_card_of_this_machine(monkeypatch):
    others = Process(1, 2**30), Process(2, None)
    card = Detected("NVIDIA GeForce RTX 4090", 24564 * 2**20, 5 * 2**30, "8.9", others)
    monkeypatch.setattr(gpus, "detect", lambda: (card,))
    result = razorctl("plan", *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["gpu"]["name"] == "NVIDIA GeForce RTX 4090"
    assert document["budget_bytes"] == 5 * 2**30
    assert gpus.target()[2] == "free now, beside 2 other processes"
    assert gpus.target(vram="8GB")[1:] == (8 * 2**30, "as asked for", False)
    monkeypatch.setattr(gpus, "detect", lambda: (replace(card, name="Some Card"),))
    assert "Some Card has no preset; name one with --gpu" in razorctl("plan", *SMALL).stderr


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_command_says_its_rates_and_runs_the_planned_job(optimizer, monkeypatch):
    flags = ("--gpu", "t4", "--method", "full", "--optimizer", optimizer, "--json")
    document = json.loads(razorctl("plan", *SMALL, *flags).stdout)
    words = shlex.split(document["command"])
    assert {"--lr", "--weight-decay"} <= set(words)
    jobs = []

    def note(job, *_, **__):
        jobs.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "finetune", note)
    assert razorctl(*words[1:]).exit_code == 130
    assert jobs == [Job(**document["job"])]


def test_finetune_runs_what_was_planned(tmp_path):
    planned = razorctl(
        "plan", "vit-micro", "digits", "--gpu", "t4", "--precision", "fp32", "--json"
    )
    document = json.loads(planned.stdout)
    document_file = tmp_path / "p.json"
    document_file.write_text(planned.stdout)
    other = razorctl("finetune", "--plan", "p.json", "--ratio", "0.3", "--device", "cpu")
    assert other.exit_code == 2
    assert "p.json settles ratio; leave it out, or plan again." in other.stderr
    other = razorctl("finetune", "--plan", "p.json", "--vram", "8GB", "--device", "cpu")
    assert "p.json settles vram; leave it out, or plan again." in other.stderr
    short = json.loads(
        razorctl(
            "finetune",
            *SMALL[:2],
            "--gpu",
            "t4",
            "--precision",
            "fp32",
            "--steps",
            "2",
            "--device",
            "cpu",
            "--json",
        ).stdout
    )
    assert short["recipe"] == document["chosen"]["recipe"]
    assert short["predicted"] == document["chosen"]["predicted"]
    assert short["job"] == document["job"] | {"steps": 2, "warmup_steps": 0, "evaluate_every": 1}
    assert short["saved_bytes"] == short["predicted"]["saved_bytes"]


def test_a_plan_file_is_run_as_it_is(tmp_path):
    (tmp_path / "razorctl.toml").write_text("[job]\nsteps = 2\n[recipe]\nratio = 0.7\n")
    planned = razorctl("plan", *SMALL, "--gpu", "t4", "--precision", "fp32", "--json")
    document = json.loads(planned.stdout)
    assert {e["recipe"]["ratio"] for e in document["candidates"]} == {0.7}
    (tmp_path / "p.json").write_text(planned.stdout)
    (tmp_path / "razorctl.toml").unlink()
    run = razorctl("finetune", "--plan", "p.json", "--device", "cpu")
    assert run.exit_code == 0, run.stderr
    assert "ratio 0.7" in run.stdout
    assert "peak as planned" in run.stdout
    assert "median of 2" in run.stdout


def test_without_a_model_or_a_plan():
    result = razorctl("finetune")
    assert result.exit_code == 2
    assert "name a model and a data set" in result.stderr


RECIPES = sorted(presets.files("recipes"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_preset_is_sound(name):
    tables = read_toml(presets.files("recipes")[name])
    assert tables["summary"].startswith("Sheared Backpropagation (CVPR 2024), Tab. ")
    Job("vit-b16", "cifar100", **tables["job"])
    recipe = Recipe(**tables["recipe"])
    table = int(re.match(r"sheared-tab(\d)", name)[1])
    assert f"Tab. {table}: " in tables["summary"]
    if recipe.method != "full":
        assert f"at {recipe.ratio:.0%}".replace("%", " %") in tables["summary"]
    if recipe.joint_budget < 1:
        assert f"JointSpar at {recipe.joint_budget:.0%}".replace("%", " %") in tables["summary"]


def test_a_recipe_preset_is_the_weakest_word(tmp_path):
    run = razorctl(
        *("finetune", "vit-micro", "digits", "--recipe", "sheared-tab1-js70", "--json"),
        *("--steps", "1", "--batch-size", "16", "--device", "cpu"),
    )
    assert run.exit_code == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["recipe"]["method"] == "prebackrazor++"
    assert document["recipe"]["joint_budget"] == 0.7
    assert document["job"]["batch_size"] == 16
    assert document["job"]["learning_rate"] == 0.01
    words = ("plan", *SMALL, "--recipe", "sheared-tab1-full", "--gpu", "t4")
    assert "--lr 0.01 " in razorctl(*words).stdout
    assert "--lr 0.003 " in razorctl(*words, "--optimizer", "adamw").stdout
    unknown = razorctl("finetune", "vit-micro", "digits", "--recipe", "sheared-tab1-js7")
    assert unknown.exit_code == 2
    assert "unknown recipe 'sheared-tab1-js7'; did you mean 'sheared-tab1-js70'?" in unknown.stderr
    (tmp_path / "own.toml").write_text("[job]\nepochs = 1.0\nsteps = 3\n[recipe]\nratoi = 1\n")
    own = razorctl("finetune", "vit-micro", "digits", "--recipe", "own.toml")
    assert own.exit_code == 2
    assert "unknown setting in own.toml 'ratoi'; did you mean 'ratio'?" in own.stderr


CARD = Detected("NVIDIA GeForce RTX 4090", 24564 * 2**20, 20 * 2**30, "8.9", ())
JOB = {"model": "vit-micro", "dataset": "digits", "batch_size": 1024}


@pytest.fixture
def on_a_card(monkeypatch):
    monkeypatch.setattr(devices, "find", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "name", lambda device: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(gpus, "detect", lambda: (CARD,))


def test_finetune_plans_for_the_card_it_finds(on_a_card, capsys):
    job, recipe, document = planning.settle(Settings(JOB), None)
    assert (recipe.method, job.precision, job.accumulate) == ("full", "bf16", 1)
    assert document["budget_bytes"] == 20 * 2**30
    said = "planned for NVIDIA GeForce RTX 4090, 20.00 GiB: full, the fastest exact way that fits."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("order", [{"method": "razor"}, {"ratio": 0.8}, {"joint_budget": 0.5}])
def test_a_recipe_is_an_order(on_a_card, order):
    _, recipe, document = planning.settle(Settings(JOB | order), None)
    assert recipe == Recipe(**order)
    assert document is None


def test_what_is_said_of_planning_where_nothing_is_planned_is_noted(on_a_card, capsys):
    planning.settle(Settings(JOB | {"method": "razor", "prefer": "fast"}), None)
    assert "prefer does nothing where nothing is planned." in capsys.readouterr().err


def test_a_card_without_a_preset_is_not_planned_for(on_a_card, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "detect", lambda: (replace(CARD, name="Some Card"),))
    assert planning.settle(Settings(JOB), None) == (Job(**JOB), Recipe(), None)
    assert "no preset is known for" in capsys.readouterr().err


def test_the_command_of_a_plan_is_an_order(tmp_path):
    for method in ("razor", "full"):
        words = razorctl("plan", *SMALL, "--gpu", "t4", "--method", method).stdout.split()
        assert words[words.index("--method") + 1] == method


@pytest.mark.parametrize("source", [["--gpu", "t4"], ["--plan", "p.json"]])
def test_a_plan_in_fp16_is_refused_on_a_cpu_before_anything_else(source, tmp_path, monkeypatch):
    planned = razorctl("plan", *SMALL, "--gpu", "t4", "--json")
    (tmp_path / "p.json").write_text(planned.stdout)
    monkeypatch.setattr(planner, "plan", None)
    names = [] if "--plan" in source else SMALL
    result = razorctl("finetune", *names, *source, "--device", "cpu")
    assert result.exit_code == 2
    assert "is in fp16, which cannot be trained on cpu; plan with --precision" in result.stderr


def test_a_card_whose_rates_were_not_measured_says_whose_stand_in():
    words = " ".join(razorctl("plan", *SMALL, "--gpu", "rtx-3060").stdout.split())
    assert "at the shares of its peak rates that the NVIDIA GeForce RTX 3090 reaches" in words


def test_a_card_that_is_assumed_is_named():
    result = razorctl("plan", *SMALL, "--vram", "11GB")
    assert "RTX 2080 Ti is assumed from --vram alone; --gpu names another card." in result.stderr
    assert "assumed" not in razorctl("plan", *SMALL, "--gpu", "t4", "--vram", "8GB").stderr


def test_a_refusal_shows_what_was_looked_at():
    result = razorctl("plan", *SMALL, "--gpu", "t4", "--vram", "640MB")
    assert result.exit_code == 3
    for method in ("full", "checkpoint", "razor 0.9", "lora"):
        assert f"  {method}" in result.stdout
    assert ">" not in result.stdout


def test_a_text_model_is_planned_for_texts(monkeypatch):
    monkeypatch.setattr(planner, "plan", lambda job, *_, **__: pytest.fail(job.dataset))
    with pytest.raises(pytest.fail.Exception, match="rte"):
        CliRunner().invoke(app, ["plan", "bert-base", "--gpu", "t4"], catch_exceptions=False)
