"""Planned runs of `finetune`: by a file, for a card that is named, for the card that is found."""

import json
import shlex
from dataclasses import replace

import pytest
import torch

from razorctl.cli import planning
from razorctl.cli.settings import Settings
from razorctl.config.job import STATE, Job
from razorctl.config.recipe import Recipe
from razorctl.planning import detect
from razorctl.planning import plan as planner
from razorctl.planning.detect import Detected
from razorctl.system import devices
from razorctl.training import run as trainer
from tests.cli.commands import PLANNED, SMALL, razorctl


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_command_says_its_rates_and_runs_the_planned_job(optimizer, monkeypatch):
    flags = ("--gpu", "t4", "--method", "full", "--optimizer", optimizer, "--json")
    document = json.loads(razorctl("plan", *PLANNED, *flags).stdout)
    words = shlex.split(document["command"])
    assert {"--lr", "--weight-decay"} <= set(words)
    jobs = []

    def note(job, *_, **__):
        jobs.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "finetune", note)
    assert razorctl(*words[1:]).exit_code == 130
    assert jobs == [replace(Job(**document["job"]), **dict.fromkeys(STATE))]  # as by default


def test_finetune_runs_what_was_planned(tmp_path):
    order = (*SMALL[:2], "--gpu", "t4", "--precision", "fp32", "--max-ratio", "0.5", "--json")
    order += ("--no-cuda-graphs",)  # which two steps have none of either
    planned = razorctl("plan", *order)
    document = json.loads(planned.stdout)
    document_file = tmp_path / "p.json"
    document_file.write_text(planned.stdout)
    other = razorctl("finetune", "--plan", "p.json", "--ratio", "0.3", "--device", "cpu")
    assert other.exit_code == 2
    assert "p.json already sets ratio; leave it out, or plan again." in other.stderr
    other = razorctl("finetune", "--plan", "p.json", "--vram", "8GB", "--device", "cpu")
    assert "p.json already sets vram; leave it out, or plan again." in other.stderr
    other = razorctl("finetune", "--plan", "p.json", "--recipe", "sheared-tab1-full")
    assert other.exit_code == 2
    assert "p.json already sets the recipe; leave --recipe out, or plan again." in other.stderr
    short = json.loads(razorctl("finetune", *order, "--steps", "2", "--device", "cpu").stdout)
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


CARD = Detected("NVIDIA GeForce RTX 4090", 24564 * 2**20, 20 * 2**30, "8.9", ())


JOB = {"model": "vit-micro", "dataset": "digits", "batch_size": 1024}
QUICK = JOB | {"max_ratio": 0.5}


@pytest.fixture
def on_a_card(monkeypatch):
    monkeypatch.setattr(devices, "find", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "name", lambda device: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(detect, "cards", lambda: (CARD,))


def test_finetune_plans_for_the_card_it_finds(on_a_card, capsys):
    job, recipe, document = planning.resolve(Settings(QUICK), None)
    assert (recipe.method, job.precision, job.accumulate) == ("full", "bf16", 1)
    assert document["budget_bytes"] == 20 * 2**30
    said = "planned for NVIDIA GeForce RTX 4090, 20.0 GiB: full, the fastest exact way that fits."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("order", [{"method": "razor"}, {"ratio": 0.8}, {"joint_budget": 0.5}])
def test_a_recipe_is_an_order(on_a_card, order):
    _, recipe, document = planning.resolve(Settings(JOB | order), None)
    assert recipe == Recipe(**order)
    assert document is None


def test_what_is_said_of_planning_where_nothing_is_planned_is_noted(on_a_card, capsys):
    planning.resolve(Settings(JOB | {"method": "razor", "prefer": "fast"}), None)
    assert "prefer does nothing: the run is not planned." in capsys.readouterr().err


def test_a_card_without_a_preset_is_not_planned_for(on_a_card, monkeypatch, capsys):
    monkeypatch.setattr(detect, "cards", lambda: (replace(CARD, name="Some Card"),))
    assert planning.resolve(Settings(JOB), None) == (Job(**JOB), Recipe(), None)
    assert "has no preset." in capsys.readouterr().err


@pytest.mark.parametrize("source", [["--gpu", "t4"], ["--plan", "p.json"]])
def test_a_plan_in_fp16_is_refused_on_a_cpu_before_anything_else(source, tmp_path, monkeypatch):
    planned = razorctl("plan", *PLANNED, "--gpu", "t4", "--json")
    (tmp_path / "p.json").write_text(planned.stdout)
    monkeypatch.setattr(planner, "plan", None)
    names = [] if "--plan" in source else SMALL
    result = razorctl("finetune", *names, *source, "--device", "cpu")
    assert result.exit_code == 2
    assert "is in fp16, which cannot be trained on cpu; plan with --precision" in result.stderr
