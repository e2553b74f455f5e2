"""Grids of settings with lists: their rows, and the command of the best."""

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from razorctl.config.settings import read_toml
from razorctl.training.comparing import grid
from razorctl.training.comparing.comparison import repeating
from razorctl.training.comparing.variants import lists_of
from tests.cli.commands import razorctl
from tests.comparing import NAMED, assert_refused, compare, write

GOOD = {"1e-05": 0.5, "3e-05": 0.7, "0.0001": 0.9, "0.001": 0.6}  # accuracy by learning rate


@pytest.fixture(autouse=True)
def cached_traces(traces, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """The commands that were called, in the place of runs whose scores depend on the rate."""
    called: list[list[str]] = []

    def call(command: list[str], wait: Callable[[], object]) -> None:
        called.append(command)
        words = dict(pairwise(command))
        steps = int(words.get("--steps", 3))
        rate = words.get("--lr", "0.0001")
        job = {"learning_rate": float(rate), "steps": steps}
        write(
            command[-1],
            words["--method"],
            seed=int(words["--seed"]),
            accuracies=[*[None] * (steps - 1), GOOD[rate]],
            step=0.5 if words["--method"] == "razor" else 1.0,
            recipe={"ratio": float(words.get("--ratio", 0.9))},
            **job,
        )
        wait()

    monkeypatch.setattr(grid, "run_child", call)
    return called


def names(commands: list[list[str]]) -> list[str]:
    return [str(Path(command[-1]).relative_to("x")) for command in commands]


RATES = ["--lr", "1e-5,3e-5,1e-4", "--out", "x"]


def test_every_method_runs_with_every_value(commands):
    result = compare(*NAMED, "--methods", "full,razor", *RATES, "--ratio", "0.9,0.95", "--json")
    assert names(commands) == [
        *(f"full-lr-{rate}-0" for rate in ("1e-05", "3e-05", "0.0001")),
        *(
            f"razor-ratio-{ratio}-lr-{rate}-0"
            for ratio in (0.9, 0.95)
            for rate in ("1e-05", "3e-05", "0.0001")
        ),
    ]
    document = json.loads(result.stdout)
    assert [row["label"] for row in document["rows"]][:4] == [
        *(f"full, lr {rate}" for rate in ("1e-05", "3e-05", "0.0001")),
        "razor, ratio 0.9, lr 1e-05",
    ]
    assert {row["speedup_vs_full"] for row in document["rows"]} == {1, 2}
    assert document["take"]["label"] == "razor, ratio 0.9, lr 0.0001"  # of the best of each method
    program, *words = shlex.split(document["command"])
    assert (program, words[:3]) == ("razorctl", ["finetune", *NAMED])
    assert words[3:] == ["--lr", "0.0001", "--method", "razor"]
    shown = compare("x").stdout
    assert shown.splitlines()[-1] == document["command"]
    assert compare("x", "--json").stdout == result.stdout


def test_other_values_are_not_resumed(commands):
    compare(*NAMED, "--methods", "full", *RATES)
    refused = compare(*NAMED, "--methods", "full", "--lr", "1,2", *RATES[2:], "--resume")
    assert_refused(refused, 2, "x was started with learning rate [1e-05, 3e-05, 0.0001]; resume it")


def test_one_method_has_its_best_setting_and_is_repeated_by_one_command(commands):
    result = compare(*NAMED, "--methods", "razor", *RATES)
    assert (
        result.stdout.splitlines()[-2] == "Take razor, lr 0.0001: the best of 3 settings (1 seed)."
    )
    _, *words = shlex.split(repeating(Path("x")))
    assert razorctl(*words, "--out", "y").exit_code == 0
    assert read_toml(Path("x/comparison.toml")) == read_toml(Path("y/comparison.toml"))


BAD = {
    "no number": (["--lr", "1e-5,fast"], "learning rate '1e-5,fast' is not made of numbers"),
    "an empty value": (["--lr", "1e-5,"], "learning rate '1e-5,' is not made of numbers"),
    "no whole number": (["--batch-size", "8,8.5"], "batch size '8,8.5' is not made of whole num"),
    "a bad value": (["--lr", "1e-5,-1"], "learning rate -1.0 is not a positive number"),
    "a list of depths": (["--freeze", "2,4"], "freeze '2,4' has several numbers of blocks; give"),
    "a list of names": (["--optimizer", "sgd,adamw"], "only numbers can have one; give one value"),
    "no ratio": (["--ratio", "0.5,0.9", "--methods", "full"], "needs a method with a ratio, and"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_list(case, commands):
    args, sentence = BAD[case]
    result = compare(*NAMED, *args, "--out", "x")
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr.splitlines()[-1]
    assert not Path("x").exists()


def test_one_value_is_no_list():
    assert lists_of({"learning_rate": "1,1", "seed": 3, "text_column": "a,b"}) == (
        {"learning_rate": 1.0, "seed": 3, "text_column": "a,b"},
        {},
    )
