"""compare: finished runs on disk, the figures of a row, and one small grid that is really run."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console
from typer.testing import CliRunner, Result

import razorctl
from razorctl import comparison, planner, views
from razorctl.cli import app
from razorctl.comparison import Grid, pareto, read
from razorctl.errors import DataError, RazorError, UsageError
from razorctl.job import Job
from razorctl.recipe import METHODS, Recipe

CONTRACT = [
    "method",
    "ratio",
    "joint_budget",
    "attention",
    "saved_bytes",
    "peak_bytes",
    "step_seconds",
    "epoch_seconds",
    "accuracy",
    "accuracy_std",
    "memory_vs_full",
    "speedup_vs_full",
    "time_to_target",
    "error",
]
JOB = Job("vit-micro", "digits", batch_size=16, steps=3)
SMALL = ["--steps", "3", "--batch-size", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for name in list(os.environ):
        if name.startswith("RAZORCTL_"):
            monkeypatch.delenv(name)


def compare(*args: str) -> Result:
    return CliRunner().invoke(app, ["compare", *args])


def write(
    name: str,
    method: str = "full",
    *,
    seed: int = 0,
    accuracies: Sequence[float | None] = (None, 0.5, 0.9),
    saved: int = 1000,
    peak: int | None = None,
    step: float = 1.0,
    device: str = "cpu",
    version: str = razorctl.__version__,
    recipe: dict[str, Any] | None = None,
    **job: Any,
) -> Path:
    """A run directory as finetune writes it, but for the weights."""
    out = Path(name)
    out.mkdir(parents=True)
    settings = {"model": "vit-micro", "dataset": "digits", "batch_size": 16, "steps": 3, **job}
    result = {
        "model": settings["model"],
        "dataset": settings["dataset"],
        "recipe": asdict(Recipe(method, **(recipe or {}))),
        "job": asdict(Job(seed=seed, **settings)),
        "steps": len(accuracies),
        "accuracy": accuracies[-1],
        "saved_bytes": saved,
        "peak_bytes": peak,
        "step_seconds": step,
        "epoch_seconds": 10 * step,
        "device": device,
    }
    lines = [{"seconds": step, "accuracy": accuracy} for accuracy in accuracies]
    (out / "config.toml").write_text(tomli_w.dumps({"environment": {"razorctl": version}}))
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "result.json").write_text(json.dumps(result))
    return out


def rows(*directories: Path, target: float | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = comparison.finished(directories).document(target)["rows"]
    return found


class TestFinishedRuns:
    def test_seeds_of_one_setting_make_a_row(self):
        full = [write(f"f{s}", seed=s, accuracies=(None, a), step=s + 1.0) for s, a in SEEDS]
        razor = write("r", "razor", saved=100, step=0.5, accuracies=(None, 0.7))
        first, second = rows(*full, razor)
        assert list(first)[: len(CONTRACT)] == CONTRACT
        assert first["method"] == "full"
        assert first["ratio"] is None
        assert first["accuracy"] == pytest.approx(0.8)
        assert first["accuracy_std"] == pytest.approx(0.1)  # of the sample
        assert first["step_seconds"] == 2
        assert (first["seeds"], first["accuracies"]) == ([0, 1, 2], [0.7, 0.8, 0.9])
        assert first["memory_vs_full"] == first["speedup_vs_full"] == 1
        assert (second["method"], second["ratio"], second["accuracy_std"]) == ("razor", 0.9, None)
        assert second["memory_vs_full"] == pytest.approx(0.1)
        assert second["speedup_vs_full"] == pytest.approx(4)

    def test_rows_are_told_apart_by_what_differs(self):
        runs = [
            write("a", "razor"),
            write("b", "razor", recipe={"ratio": 0.8}),
            write("c", "razor", batch_size=32),
            write("d", "full", accumulate=4),
        ]
        labels = [row["label"] for row in rows(*runs)]
        same = [planner.label(Recipe(ratio=ratio), 1) for ratio in (0.9, 0.8, 0.9)]
        sizes = [f"batch size {size}" for size in (16, 16, 32, 16)]
        names = [*same, planner.label(Recipe("full"), 4)]
        assert labels == [f"{name}, {size}" for name, size in zip(names, sizes, strict=True)]

    def test_full_is_what_has_the_same_settings_and_is_plain(self):
        runs = [
            write("a", saved=8, accumulate=4),
            write("b", saved=32),
            write("c", saved=16, recipe={"attention": "flash"}),
            write("d", saved=64, batch_size=32),
            write("e", "razor", saved=4, device="a GPU"),
        ]
        found = rows(*runs)
        assert [row["memory_vs_full"] for row in found] == [0.25, 1, 0.5, 1, None]
        assert found[-1]["speedup_vs_full"] is None

    def test_a_measured_peak_and_a_traced_figure_are_never_in_one_column(self):
        gpu = [write("a", peak=4000), write("b", "razor", saved=100, peak=1000)]
        document = comparison.finished(gpu).document()
        assert document["memory"] == "peak_bytes"
        assert document["rows"][1]["memory_vs_full"] == 0.25
        mixed = comparison.finished([*gpu, write("c", "int8", saved=50)]).document()
        assert mixed["memory"] == "saved_bytes"
        assert mixed["rows"][1]["memory_vs_full"] == 0.1

    def test_twice_the_same_directory_counts_once(self):
        run = write("a")
        assert rows(run, run)[0]["seeds"] == [0]


SEEDS = ((0, 0.7), (1, 0.8), (2, 0.9))


class TestTarget:
    @pytest.mark.parametrize(
        ("accuracies", "seconds"),
        [
            ((None, 0.9, None, 0.95), 2),
            ((0.95, 0.5, None, 0.91), 4),  # the first time it did not stay
            ((None, 0.95, None, 0.89), None),
            ((None, 0.1), None),
        ],
    )
    def test_is_reached_where_accuracy_stays(self, accuracies, seconds):
        assert rows(write("a", accuracies=accuracies), target=0.9)[0]["time_to_target"] == seconds

    def test_is_99_percent_of_the_mean_of_fulls_best(self):
        runs = [
            write("a", accuracies=(0.9, 0.8)),
            write("b", seed=1, accuracies=(0.6, 0.7)),
            write("c", "razor", accuracies=(0.5, 0.793)),
        ]
        document = comparison.finished(runs).document()
        assert document["target"] == pytest.approx(0.99 * 0.8)
        full, razor = document["rows"]
        assert full["time_to_target"] is None  # one seed never gets there
        assert razor["time_to_target"] == 2

    def test_there_is_none_without_full(self):
        document = comparison.finished([write("a", "razor")]).document()
        assert document["target"] is None
        assert document["rows"][0]["time_to_target"] is None


def test_pareto():
    points = [(1.0, 5.0), (2.0, 2.0), (2.0, 2.0), (2.0, 3.0), (5.0, 1.0), (5.0, 5.0)]
    assert pareto(points) == [True, True, True, False, True, False]


def test_the_best_of_each_column_and_the_front_are_marked():
    runs = [
        write("a", accuracies=(0.95,)),
        write("b", "checkpoint", saved=100, step=1.5, accuracies=(0.95,)),
        write("c", "backrazor", saved=200, step=2.0, accuracies=(0.5,)),
    ]
    document = comparison.finished(runs).document()
    assert document["pareto"] == ["full", "checkpoint"]
    assert document["best"]["saved_bytes"] == ["checkpoint"]
    assert document["best"]["step_seconds"] == document["best"]["speedup_vs_full"] == ["full"]
    assert document["best"]["accuracy"] == ["full", "checkpoint"]
    assert document["rows"][2]["best"] == []


class TestBadRuns:
    def test_unfinished(self):
        run = write("a")
        (run / "result.json").unlink()
        with pytest.raises(UsageError, match=r"a holds no finished run; .*config\.toml finetune"):
            read(run)

    def test_of_another_version(self):
        with pytest.raises(UsageError, match=r"run by razorctl 0\.0\.1, not .*; run it again"):
            read(write("a", version="0.0.1"))

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("result.json", "{"),
            ("result.json", "[]"),
            ("metrics.jsonl", '{"seconds": 1'),
            ("metrics.jsonl", ""),
            ("metrics.jsonl", '{"seconds": 1, "accuracy": 0.5}\n'),
        ],
    )
    def test_damaged(self, file, text):
        run = write("a")
        (run / file).write_text(text)
        with pytest.raises(DataError, match="a is damaged"):
            read(run)

    def test_of_another_task(self):
        runs = [write("a"), write("b", dataset="cifar10")]
        with pytest.raises(UsageError, match="b is of vit-micro on cifar10, a of vit-micro on dig"):
            rows(*runs)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width, monkeypatch):
    big = {"saved": 14 * 2**30, "step": 12.34}
    runs = [write(f"f{s}", seed=s, accuracies=(None, a), **big) for s, a in SEEDS]
    runs += [write(f"r{s}", "prebackrazor++", seed=s, accuracies=(None, a)) for s, a in SEEDS]
    runs += [write("b", "razor", recipe={"joint_budget": 0.5, "joint": "branches"})]
    screen = io.StringIO()
    monkeypatch.setattr(views, "out", Console(file=screen, width=width))
    assert compare(*map(str, runs)).exit_code == 0
    table = screen.getvalue()
    assert "vit-micro on digits, batch 16, 3 steps, auto, 3 seeds, cpu" in table
    for part in (
        "   full",
        "   prebackrazor++",
        "*  razor",
        "80.00 ± 10.00",
        "14.00",
        "12.34",
        "100.0%",
        "GiB",
    ):
        assert part in table
    assert "…" not in table
    assert max(len(line.rstrip()) for line in table.splitlines()) <= width


def test_json_and_csv_are_all_there_is_on_stdout():
    runs = [str(write("a")), str(write("b", "razor", saved=100))]
    result = compare(*runs, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert [row["method"] for row in document["rows"]] == ["full", "razor"]
    result = compare(*runs, "--csv")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = list(csv.DictReader(io.StringIO(result.stdout)))
    assert list(lines[0])[: len(CONTRACT)] == CONTRACT
    assert [line["memory_vs_full"] for line in lines] == ["1.0", "0.1"]
    assert lines[0]["error"] == ""


NAMED = ["vit-micro", "digits"]
BAD = {
    "neither": (["nothing"], 2, "nothing is no run directory; name a model and a data set"),
    "a run and a model": (["run", "digits"], 2, "digits is no run directory"),
    "three names": (["a", "b", "c"], 2, "a is no run directory"),
    "unfinished": (["run", "half"], 2, "half holds no finished run"),
    "settings of finished runs": (["run", "--steps", "3"], 2, "take no other steps; leave it out"),
    "methods of finished runs": (["run", "--methods", "full"], 2, "take no other methods"),
    "both forms": (["run", "--json", "--csv"], 2, "give one of them"),
    "target": (["run", "--target", "95"], 2, "target 95 is outside (0, 1]"),
    "unknown model": (["vit-mikro", "digits"], 2, "did you mean 'vit-micro'?"),
    "unknown data set": (["vit-micro", "digit"], 2, "did you mean 'digits'?"),
    "unknown method": ([*NAMED, "--methods", "full,razr"], 2, "did you mean 'razor'?"),
    "unknown opponent": ([*NAMED, "--methods", "acumulate"], 2, "did you mean 'accumulate'?"),
    "no seeds": ([*NAMED, "--seeds", "0"], 2, "0 seeds are no comparison; give 1 or more"),
    "ratio": ([*NAMED, "--ratio", "1"], 2, "ratio 1.0 is outside [0, 1)"),
    "no steps": ([*NAMED, "--steps", "0"], 2, "steps 0 is not a positive number"),
    "large batch": ([*NAMED, "--batch-size", "1438"], 2, "larger than the 1437 training"),
    "existing": ([*NAMED, "--out", "run"], 2, "run exists already; go on there with --resume"),
    "in a file": ([*NAMED, "--out", "file/x"], 2, "cannot write file/x"),
    "nothing to resume": ([*NAMED, "--resume"], 2, "name the comparison with --out"),
    "resume of a run": ([*NAMED, "--resume", "--out", "run"], 2, "run holds no comparison"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(case):
    args, code, sentence = BAD[case]
    write("run")
    (write("half") / "result.json").unlink()
    Path("file").touch()
    result = compare(*args)
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert sorted(p.name for p in Path().iterdir()) == ["file", "half", "run"]


class TestGrid:
    """Children are stood in for, but for what the last tests run."""

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
            write(command[-1], method, seed=seed)

        self.failing: tuple[str, ...] = ()
        monkeypatch.setattr(comparison, "_call", call)
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
        assert "--method razor --attention auto --seed 0 --device cpu --json" in " ".join(first)
        assert [at.run for at in heard] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert grid.exit_code == 0
        assert [row["seeds"] for row in grid.comparison.document()["rows"]] == [[0, 1]] * 2

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
            (["--steps", "4"], "x was begun with steps 3; resume it so"),
            (["--steps", "3", "--ratio", "0.5"], "x was begun with ratio 0.9"),
            (["--steps", "3", "--device", "cpu"], "x was begun with device left out"),
            (["--steps", "3", "--lr", "1"], "x was begun with learning rate left out"),
        ],
    )
    def test_goes_on_with_the_same_settings_alone(self, commands, args, sentence):
        compare(*NAMED, "--methods", "full", "--steps", "3", "--out", "x")
        result = compare(*NAMED, "--methods", "full", "--out", "x", "--resume", *args)
        assert result.exit_code == 2
        assert sentence in result.stderr
        assert len(commands) == 1

    def test_settings_come_from_the_project_and_the_environment_too(self, commands, monkeypatch):
        Path("razorctl.toml").write_text(
            "[job]\nsteps = 7\nseed = 5\n[recipe]\nratio = 0.5\nmethod = 'int8'\n"
        )
        monkeypatch.setenv("RAZORCTL_BATCH_SIZE", "8")
        compare(*NAMED, "--methods", "razor", "--seeds", "2", "--out", "x")
        assert [Path(command[-1]).name for command in commands] == ["razor-5", "razor-6"]
        settings = comparison.read_toml(Path("x/comparison.toml"))
        assert settings["job"]["steps"] == 7
        assert settings["job"]["batch_size"] == 8
        assert settings["recipe"] == {"ratio": 0.5}

    def test_opponents_are_full_in_other_ways(self, commands):
        names = "full,full-stored,full-flash,accumulate"
        result = compare(*NAMED, "--methods", names, *SMALL, "--ratio", "0.5", "--json")
        full, stored, flash, accumulated = json.loads(result.stdout)["rows"]
        assert [row["method"] for row in (full, stored, flash, accumulated)] == names.split(",")
        assert "runs fused attention as it comes" in flash["error"]
        assert commands[1][8:10] == ["--attention", "stored"]
        count = int(commands[2][commands[2].index("--accumulate") + 1])
        job = JOB.resolved({}, 1437)
        job, cache = comparison.replace(job, precision="fp32"), planner.traces.Cache()

        def peak(method: str, accumulate: int) -> int:
            way = comparison.replace(job, accumulate=accumulate)
            return planner.traced(way, Recipe(method, 0.5), 10, cache).peak

        assert peak("full", count) <= peak("razor", 1) < peak("full", count // 2)


FT = "finetune"


def test_a_small_comparison_and_the_same_again():
    first = compare(*NAMED, "--methods", "full,razor", *SMALL, "--json", "--out", "a")
    assert first.exit_code == 0, first.stderr
    assert first.stderr == ""  # no bar without a terminal
    document = json.loads(first.stdout)
    second = json.loads(
        compare(*NAMED, "--methods", "full,razor", *SMALL, "--json", "--out", "b").stdout
    )
    for row, again in zip(document["rows"], second["rows"], strict=True):
        assert row["error"] is None
        for name in ("accuracies", "saved_bytes", "memory_vs_full", "seeds"):
            assert row[name] == again[name]
    assert document["rows"][1]["memory_vs_full"] <= 0.1
    assert document["memory"] == "saved_bytes"
    assert document["shared"]["steps"] == 3
    later = json.loads(compare("a/full-0", "a/razor-0", "--json").stdout)
    for row, again in zip(document["rows"], later["rows"], strict=True):
        assert row["step_seconds"] == again["step_seconds"]
        assert row["time_to_target"] == again["time_to_target"]


def test_a_command_that_fails_tells_why():
    def call(code: str) -> RazorError:
        with pytest.raises(RazorError) as caught:
            comparison._call([sys.executable, "-c", f"import os, sys; {code}"], lambda: None)
        return caught.value

    error = call("print('noise\\nerror: too large; make it small.', file=sys.stderr); sys.exit(4)")
    assert (str(error), error.exit_code) == ("too large; make it small.", 4)
    error = call("os.kill(os.getpid(), 9)")
    assert "lower --batch-size" in str(error)
    assert error.exit_code == 4
    error = call("sys.exit(3)")
    assert "ended with 3" in str(error)
    assert error.exit_code == 3


def test_interrupting_ends_the_run_that_is_on_and_keeps_the_others():
    args = ["compare", *NAMED, "--methods", "full,razor", "--steps", "100000", "--out", "x"]
    process = subprocess.Popen(
        [sys.executable, "-m", "razorctl", *args, "--device", "cpu", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, and what it starts, ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics = Path("x/full-0/metrics.jsonl")
    deadline = time.monotonic() + 120
    try:
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (stdout, stderr) == ("", "error: interrupted.\n")
    steps = metrics.read_text()
    time.sleep(1)
    assert metrics.read_text() == steps  # nothing goes on
    assert not Path("x/razor-0").exists()


def test_every_method_can_be_compared():
    assert set(METHODS) < set(comparison.NAMES)
