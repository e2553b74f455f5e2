"""A grid: its settings, its order, how runs fail; one small grid that is really run."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from razorctl.cli.app import app
from razorctl.cli.comparing import seconds_of
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import RazorError, UsageError
from razorctl.memory import trace_cache as traces
from razorctl.methods import METHODS
from razorctl.planning.cached_traces import cached_trace
from razorctl.training.comparing import figures, grid
from razorctl.training.comparing.comparison import NAMES, repeating
from razorctl.training.comparing.grid import Grid
from tests.comparing import NAMED, assert_refused, call_here, compare, write
from tests.forked import answered, small_command
from tests.models import registered

JOB = Job("vit-micro", "digits", batch_size=16, steps=3)
FLAGS = ("activation_checkpointing", "lora", "int8_forward")
SMALL = ["--steps", "3", "--batch-size", "16", "--device", "cpu"]


@pytest.fixture(autouse=True)
def cached_traces(traces, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))


BAD = {
    "unknown method": ([*NAMED, "--methods", "full,razr"], 2, "did you mean 'razor'?"),
    "unknown opponent": ([*NAMED, "--methods", "acumulate"], 2, "did you mean 'accumulate'?"),
    "no seeds": ([*NAMED, "--seeds", "0"], 2, "seeds 0 is too few; give 1 or more"),
    "no budget": (
        [*NAMED, "--budget", "soon"],
        2,
        "budget 'soon' is not a duration; give one such as",
    ),
    "existing": ([*NAMED, "--out", "run"], 2, "run exists already; continue there with --resume"),
    "in a file": ([*NAMED, "--out", "file/x"], 2, "cannot write file/x"),
    "nothing to resume": ([*NAMED, "--resume"], 2, "name the comparison with --out"),
    "resume of a run": ([*NAMED, "--resume", "--out", "run"], 2, "run holds no comparison"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(case):
    args, code, sentence = BAD[case]
    write("run")
    Path("file").touch()
    assert_refused(compare(*args), code, sentence)
    assert sorted(p.name for p in Path().iterdir()) == ["file", "run"]


class TestGrid:
    """No child process is started, except in the last tests."""

    @pytest.fixture
    def commands(self, monkeypatch):
        """The commands that were called; those of a method in `failing` fail."""
        called: list[list[str]] = []

        def call(command: list[str], wait: Any) -> None:
            called.append(command)
            method = command[command.index("--method") + 1]
            seed = int(command[command.index("--seed") + 1])
            wait()
            if method in self.failing:
                failure = RazorError("the device is out of memory; raise --ratio.")
                failure.exit_code = 4
                raise failure
            attention = command[command.index("--attention") + 1]
            recipe = {name: True for name in FLAGS if f"--{name.replace('_', '-')}" in command}
            job: dict[str, Any] = {}
            steps = int(command[command.index("--steps") + 1]) if "--steps" in command else 3
            compiled = "--compile" in command
            if "--activation-memory-budget" in command:
                job["activation_memory_budget"] = 0.1
            write(
                command[-1],
                method,
                seed=seed,
                recipe={"attention": attention, **recipe},
                steps=steps,
                compile=compiled,
                compiled=compiled,
                **job,
                accuracies=[*[None] * (steps - 2), 0.5, 0.9][-steps:],
                step=self.step.get(method, 1.0),
            )

        self.failing: tuple[str, ...] = ()
        self.step: dict[str, float] = {"razor": 0.5}  # seconds
        monkeypatch.setattr(grid, "run_child", call)
        return called

    def test_runs_every_method_with_a_seed_before_the_next_seed(self, commands):
        grid = Grid(JOB, ["full", "razor", "full"], ratio=0.8, seeds=2, device="cpu", out=Path("x"))
        heard = []
        grid.run(heard.append)
        assert [command[-1] for command in commands] == [
            "x/full-0",
            "x/razor-0",
            "x/full-1",
            "x/razor-1",
        ]
        first = commands[1]
        assert first[:6] == [sys.executable, "-m", "razorctl", "--config", "x/comparison.toml", FT]
        assert "--method razor --attention auto --seed 0 --strict --device" in " ".join(first)
        assert [at.run for at in heard] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert [at.end for at in heard[:3]] == [None, None, "accuracy 0.9000"]
        assert grid.comparison.exit_code == 0
        assert [row["seeds"] for row in figures.document(grid.comparison)["rows"]] == [[0, 1]] * 2

    def test_one_that_fails_is_a_row_with_its_reason(self, commands):
        self.failing = ("full",)
        result = compare(*NAMED, "--methods", "full,razor", "--json")
        assert result.exit_code == 0
        full, razor = json.loads(result.stdout)["rows"]
        assert full["error"] == "the device is out of memory; raise --ratio."
        assert full["accuracy"] is None
        assert (razor["error"], razor["accuracy"]) == (None, 0.9)
        result = compare(*NAMED, "--methods", "full")
        assert result.exit_code == 4
        assert "full: the device is out of memory" in result.stdout
        assert "vit-micro on digits, 0 seeds" in result.stdout

    def test_is_shown_again_from_its_directory(self, commands):
        self.failing = ("razor", "int8")
        names = ["--methods", "full,razor,full-stored,int8", "--seeds", "2", "--out", "x"]
        shown = compare(*NAMED, *names).stdout
        assert compare("x").stdout == shown
        assert "razor: seed" not in shown
        self.failing = ()
        compare(*NAMED, "--methods", "razor", "--seeds", "3", "--resume", "--out", "x")
        rows = {row["label"]: row for row in json.loads(compare("x", "--json").stdout)["rows"]}
        assert {label: row["seeds"] for label, row in rows.items()} == {
            "full": [0, 1],
            "razor": [0, 1, 2],
            "full-stored": [0, 1],
            "int8": [],
        }
        assert rows["full"]["error"] == "seed 2: not finished; continue with --resume --out x."
        write("y", "razor", seed=7, recipe={"ratio": 0.8})
        mixed = json.loads(compare("x", "y", "x/full-1", "--json").stdout)["rows"]
        labels = ["full", "razor 0.9", "full, stored attention", "int8", "razor 0.8"]
        assert [row["label"] for row in mixed] == labels
        assert mixed[0]["seeds"] == [0, 1]
        write("z", dataset="cifar10")
        assert "z is of vit-micro on cifar10, x of vit-micro on digits" in compare("x", "z").stderr

    def test_a_ratio_that_no_method_has_is_said_to_do_nothing(self, commands):
        ratio = ["--ratio", "0.5", "--methods"]
        assert "note: the ratio does nothing" in compare(*NAMED, *ratio, "full,full-stored").stderr
        assert "note: " not in compare(*NAMED, *ratio, "full,razor").stderr

    def test_goes_on_where_it_was_left(self, commands):
        self.failing = ("razor",)
        compare(*NAMED, "--methods", "full,razor", "--steps", "3", "--out", "x")
        write("x/checkpoint-0")
        Path("x/checkpoint-0/result.json").unlink()
        self.failing = ()
        again = ["--methods", "full,razor,checkpoint", "--steps", "3", "--out", "x", "--resume"]
        result = compare(*NAMED, *again, "--json")
        assert [Path(command[-1]).name for command in commands] == [
            "full-0",
            "razor-0",
            "razor-0",
            "checkpoint-0",
        ]
        assert [row["error"] for row in json.loads(result.stdout)["rows"]] == [None] * 3

    @pytest.mark.parametrize(
        ("args", "sentence"),
        [
            (["--steps", "3", "--device", "cpu"], "x was started with device left out"),
            (["--steps", "3", "--lr", "1"], "x was started with learning rate left out"),
        ],
    )
    def test_goes_on_with_the_same_settings_alone(self, commands, args, sentence):
        compare(*NAMED, "--methods", "full", "--steps", "3", "--out", "x")
        result = compare(*NAMED, "--methods", "full", "--out", "x", "--resume", *args)
        assert result.exit_code == 2
        assert sentence in result.stderr
        assert len(commands) == 1

    def test_after_the_budget_no_run_starts(self, commands, monkeypatch):
        """A run takes 60 seconds, and the clock of a resumed comparison starts anew."""
        monkeypatch.setattr(grid.time, "monotonic", lambda: 60.0 * len(commands))
        args = [*NAMED, "--methods", "full,razor", "--seeds", "2", "--steps", "3", "--out", "x"]
        stopped = compare(*args, "--budget", "2m", "--json")
        assert [Path(command[-1]).name for command in commands] == ["full-0", "razor-0"]
        rows = json.loads(stopped.stdout)["rows"]
        assert [row["seeds"] for row in rows] == [[0], [0]]
        assert {row["error"] for row in rows} == {
            "seed 1: not finished; continue with --resume --out x."
        }
        left = "note: the budget is spent; x holds 2 of 4 runs; continue with --resume --out x."
        assert (stopped.exit_code, stopped.stderr.splitlines()[-1]) == (0, left)
        resumed = compare(*args, "--budget", "61s", "--resume", "--json")
        assert [Path(command[-1]).name for command in commands[2:]] == ["full-1", "razor-1"]
        assert [row["error"] for row in json.loads(resumed.stdout)["rows"]] == [None, None]
        assert "the budget is spent" not in resumed.stderr
        compare(*args, "--budget", "1s", "--resume", "--methods", "full,razor,int8")
        assert [Path(command[-1]).name for command in commands[4:]] == ["int8-0"]
        grid.shutil.rmtree("x/full-0")
        finished = compare(*args, "--budget", "1s", "--resume")  # all others are
        assert (len(commands), "the budget is spent" in finished.stderr) == (6, False)

    def test_is_repeated_by_one_command(self, commands):
        Path("razorctl.toml").write_text("[job]\nseed = 5\nlearning_rate = 0.3\n")
        args = ["--methods", "full,razor", "--ratio", "0.5", "--seeds", "2"]
        compare(*NAMED, *args, "--device", "cpu", "--out", "x")
        Path("razorctl.toml").unlink()
        program, *words = shlex.split(repeating(Path("x")))
        assert program == "razorctl"
        assert CliRunner().invoke(app, [*words, "--out", "y"]).exit_code == 0
        first, again = (grid.read_toml(Path(name) / "comparison.toml") for name in "xy")
        assert first == again

    def test_baselines_change_settings_of_full_or_razor(self, commands):
        flags = {
            "full-compiled": "--method full --attention auto --compile",
            "activation-memory-budget": (
                "--method full --attention auto --compile --activation-memory-budget 0.1"
            ),
            "razor-compiled": "--method razor --attention auto --compile",
            "razor-checkpoint": "--method razor --attention auto --activation-checkpointing",
            "razor-lora": "--method razor --attention auto --lora",
            "razor-branches": (
                "--method razor --attention auto --joint-budget 0.5 --joint branches"
            ),
            "razor-int8-forward": "--method razor --attention auto --int8-forward",
        }
        names = ",".join(["full", *flags])
        result = compare(*NAMED, "--methods", names, "--steps", "3", "--out", "x", "--json")
        document = json.loads(result.stdout)
        for command, wanted in zip(commands[1:], flags.values(), strict=True):
            words = " ".join(command[6:]).replace("--seed 0 --strict ", "")
            assert words.startswith(f"{wanted} --"), words
        rows = {row["label"]: row for row in document["rows"]}
        assert list(rows) == ["full", *flags]
        assert [name for name, row in rows.items() if row["exact"]] == [
            "full",
            "full-compiled",
            "activation-memory-budget",
        ]
        # Plain full is what all are compared with, however they compile.
        assert [row["speedup_vs_full"] for row in rows.values()] == [1, 1, 1] + [2] * 5
        assert document["target"] is not None
        assert document["take"]["label"] is not None
        words = " ".join(compare("x").stdout.split())
        assert "traced without compiling or its memory budget." in words
        merged = json.loads(compare("x", "x/full-0", "--json").stdout)
        assert [row["label"] for row in merged["rows"]][:4] == [
            "full",
            "full, compiled",
            "full, compiled, activation memory budget 0.1",
            "razor 0.9, compiled",
        ]

    def test_opponents_are_full_in_other_ways(self, commands):
        with registered(shallow=True):  # which is for no other test of this file
            names = "full,full-stored,full-flash,accumulate"
            result = compare(*NAMED, "--methods", names, *SMALL, "--ratio", "0.5", "--json")
            full, stored, flash, accumulated = json.loads(result.stdout)["rows"]
            assert [row["method"] for row in (full, stored, flash, accumulated)] == names.split(",")
            assert "has fused attention already" in flash["error"]
            assert commands[1][8:10] == ["--attention", "stored"]
            count = int(commands[2][commands[2].index("--accumulate") + 1])
            job = JOB.resolved({}, 1437)
            job, cache = grid.replace(job, precision="fp32"), traces.Cache()

            def peak(method: str, accumulate: int) -> int:
                way = grid.replace(job, accumulate=accumulate)
                return cached_trace(way, Recipe(method, 0.5), 10, cache, "cpu").peak

            assert peak("full", count) <= peak("razor", 1) < peak("full", count // 2)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2 m", 120)]
)
def test_the_seconds_of_a_budget(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "-5m", "0s", "10 minutes", "1e3s", "5d", ""])
def test_what_is_no_budget(text):
    with pytest.raises(UsageError, match=r"is not a duration; give one such as 90s, 10m or 1\.5h"):
        seconds_of(text)


FT = "finetune"


def test_a_small_comparison_and_the_same_again(monkeypatch, shallow):
    own = grid.run_child

    def call(command: list[str], wait: Any) -> None:
        if "full" not in command:
            return call_here(command, wait)
        assert command[:3] == [sys.executable, "-m", "razorctl"]
        return own([*answered(small_command, Path.cwd()), *command[3:]], wait)

    monkeypatch.setattr(grid, "run_child", call)  # a process for one of the two
    first = compare(*NAMED, "--methods", "full,razor", *SMALL, "--json", "--out", "a")
    assert first.exit_code == 0, first.stderr
    lines = first.stderr.splitlines()
    assert lines[:4] == [
        "preparing to compare on vit-micro and digits ...",
        "vit-micro on digits: full, razor; 1 seed",
        "directory: a",
        "run 1 of 2: full, seed 0: starting",
    ]
    assert all(line.startswith("run ") for line in lines[3:])  # none of a child's
    document = json.loads(first.stdout)
    assert [row["error"] for row in document["rows"]] == [None, None]
    monkeypatch.setattr(grid, "run_child", call_here)  # nothing of a run depends on its process
    second = compare(*NAMED, "--methods", "full", *SMALL, "--json", "--out", "b").stdout
    (again,) = json.loads(second)["rows"]
    for name in ("accuracies", "saved_bytes", "seeds"):
        assert document["rows"][0][name] == again[name]
    assert document["rows"][1]["memory_vs_full"] <= 0.1
    assert document["memory"] == "saved_bytes"
    assert document["shared"]["steps"] == 3
    assert json.loads(compare("a", "--json").stdout) == document
    later = json.loads(compare("a/full-0", "a", "--json").stdout)
    assert [row["label"] for row in later["rows"]] == ["full", "razor 0.9"]
    for row, again in zip(document["rows"], later["rows"], strict=True):
        assert row["step_seconds"] == again["step_seconds"]
        assert row["time_to_target"] == again["time_to_target"]


def test_every_method_can_be_compared():
    assert set(METHODS) < set(NAMES)
