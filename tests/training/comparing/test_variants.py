"""Grids of settings with lists: their rows, rounds of halves, and the command of the best."""

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from razorctl.training.comparing import grid
from razorctl.training.comparing.comparison import repeating
from razorctl.training.comparing.variants import Rounds, lists_of, rows_of, shares
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


def test_a_budget_is_spent_in_rounds_of_the_better_half(commands):
    args = ["--methods", "full,razor", *RATES, "--budget", "72s"]
    result = compare(*NAMED, *args, "--json")
    probes, runs = commands[:2], names(commands[2:])
    assert len(probes) == 2  # a learning rate does not change the time of a step
    assert runs == [
        *(f"round-1/{m}-lr-{r}-0" for m in ("full", "razor") for r in ("1e-05", "3e-05", "0.0001")),
        *(f"round-2/{m}-lr-{r}-0" for m in ("full", "razor") for r in ("3e-05", "0.0001")),
        *(f"round-3/{m}-lr-0.0001-0" for m in ("full", "razor")),
    ]
    steps = {Path(c[-1]).parts[1]: int(c[c.index("--steps") + 1]) for c in commands[2:]}
    assert steps == {"round-1": 8, "round-2": 12, "round-3": 24}  # of razor, whose runs come last
    document = json.loads(result.stdout)
    labels = [row["label"] for row in document["rows"] if row["method"] == "razor"]
    assert labels == ["razor, lr 1e-05, round 1 of 3", "razor, lr 3e-05, round 2 of 3", labels[2]]
    assert labels[2] == "razor, lr 0.0001"
    assert document["take"]["label"] == "full, lr 0.0001"  # as soon at the target, and exact
    assert "--steps" not in document["command"]

    done = len(commands)
    assert compare(*NAMED, *args, "--resume", "--json").stdout == result.stdout
    assert len(commands) == done
    grid.shutil.rmtree("x/round-2/full-lr-3e-05-0")
    assert compare(*NAMED, *args, "--resume", "--json").stdout == result.stdout
    assert names(commands[done:]) == ["round-2/full-lr-3e-05-0"]
    grid.shutil.rmtree("x/round-3")
    assert "Nothing to take yet: no run of the last round is finished." in compare("x").stdout
    refused = compare(*NAMED, *args[:2], "--lr", "1,2", *args[4:], "--resume")
    assert_refused(refused, 2, "x was begun with learning rate [1e-05, 3e-05, 0.0001]; resume it")


def test_one_method_has_its_best_setting_and_is_repeated_by_one_command(commands):
    result = compare(*NAMED, "--methods", "razor", *RATES, "--budget", "60s")
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
    "too large": (["--batch-size", "8,9999"], "batch size 9999 is larger than the 1,437"),
    "a bad ratio": (["--ratio", "0.5,1"], "ratio 1.0 is outside [0, 1)"),
    "a list of depths": (["--freeze", "2,4"], "freeze '2,4' has several numbers of blocks; give"),
    "a list of names": (["--optimizer", "sgd,adamw"], "only numbers can have one; give one value"),
    "no ratio": (["--ratio", "0.5,0.9", "--methods", "full"], "needs a method that has one, which"),
    "a budget and steps": (["--steps", "3,6", "--budget", "9s"], "steps and a budget cannot both"),
    "a small budget": (
        ["--lr", "1e-5,1e-4", "--methods", "full", "--budget", "3s"],
        "too small for one step of each run; give --budget 4s or more",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_list(case, commands):
    args, sentence = BAD[case]
    result = compare(*NAMED, *args, "--out", "x")
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr.splitlines()[-1]
    assert not Path("x").exists()


def test_rounds_halve_the_rows_of_each_method():
    rates = {"learning_rate": (1.0, 2.0, 3.0, 4.0, 5.0)}
    rows = rows_of(["full", "razor"], rates, lambda name: Recipe(name))
    rounds = Rounds(rows, rates, budget=True)
    assert [rounds.size(at) for at in rounds] == [10, 6, 4, 2]
    assert shares(rounds, 240.0, seeds=2) == [3.0, 5.0, 7.5, 15.0]

    def score(at, row):  # the highest rate fails, and the next round turns the order
        rate = dict(row.values)["learning_rate"]
        return None if rate == 5 else rate if at == 0 else -rate

    taken = [[v for ((_, v),) in (r.values for r in rounds.taken(at, score))] for at in rounds]
    assert taken == [[1, 2, 3, 4, 5] * 2, [2, 3, 4] * 2, [2, 3] * 2, [2] * 2]
    assert lists_of({"learning_rate": "1,1", "seed": 3, "text_column": "a,b"}) == (
        {"learning_rate": 1.0, "seed": 3, "text_column": "a,b"},
        {},
    )
