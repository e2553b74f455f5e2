"""The sources of settings, and their order: flags, environment, project file, presets."""

import json
from pathlib import Path

import pytest

from razorctl.config import presets
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from tests.cli.commands import PLANNED, finetune, razorctl


class TestPrecedence:
    def steps_and_ratio(self, *args: str) -> tuple[int, float]:
        result = razorctl("finetune", "vit-micro", "digits", "--json", "--device", "cpu", *args)
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        return document["steps"], document["recipe"]["ratio"]

    def test_flag_over_environment_over_project_file(self, monkeypatch):
        Path("razorctl.toml").write_text("[job]\nsteps = 2\n[recipe]\nratio = 0.5\n")
        assert self.steps_and_ratio() == (2, 0.5)
        monkeypatch.setenv("RAZORCTL_RATIO", "0.6")
        assert self.steps_and_ratio() == (2, 0.6)
        assert self.steps_and_ratio("--ratio", "0.7", "--steps", "1") == (1, 0.7)

    def test_a_runs_config_repeats_it(self):
        first = json.loads(finetune("--json", "--seed", "4", "--out", "one").stdout)
        again = razorctl("--config", "one/config.toml", "finetune", "--json", "--device", "cpu")
        second = json.loads(again.stdout)
        for key in ("recipe", "job", "accuracy", "loss", "saved_bytes"):
            assert first[key] == second[key]
        assert Path(first["weights"]).read_bytes() == Path(second["weights"]).read_bytes()

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("[job]\nstep = 2", "unknown setting in razorctl.toml 'step'; did you mean 'steps'?"),
            ("[job", "razorctl.toml is not valid TOML"),
            ("job = 3", "job in razorctl.toml is not a table"),
            ("[job]\nmomentum = 'much'", "momentum"),
            ("[jobs]\nsteps = 1", "unknown table in razorctl.toml 'jobs'; did you mean 'job'?"),
            ("[job]\nsteps = true", "razorctl.toml: steps True is not of type int"),
            ("[job]\nsteps = 99999999999999999999", "is too large"),
            ("[recipe]\njoint = 3", "joint 3 is not of type str"),
        ],
    )
    def test_a_bad_project_file_is_refused(self, text, sentence):
        Path("razorctl.toml").write_text(text)
        result = finetune()
        assert result.exit_code == 2
        assert sentence in result.stderr

    def test_a_missing_config_is_refused(self):
        result = razorctl("--config", "nowhere.toml", "list")
        assert result.exit_code == 2
        assert "cannot read nowhere.toml" in result.stderr


RECIPES = sorted(presets.files("recipes"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_preset_is_sound(name):
    tables = read_toml(presets.files("recipes")[name])
    Job("vit-b16", "cifar100", **tables["job"])
    Recipe(**tables["recipe"])
    assert tables["summary"]


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
    words = ("plan", *PLANNED, "--recipe", "sheared-tab1-full", "--gpu", "t4")
    assert "--lr 0.01 " in razorctl(*words).stdout
    assert "--lr 0.003 " in razorctl(*words, "--optimizer", "adamw").stdout
    unknown = razorctl("finetune", "vit-micro", "digits", "--recipe", "sheared-tab1-js7")
    assert unknown.exit_code == 2
    assert "unknown recipe 'sheared-tab1-js7'; did you mean 'sheared-tab1-js70'?" in unknown.stderr
