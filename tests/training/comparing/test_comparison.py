"""Finished runs on disk, the figures of a row, and their tables."""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from razorctl.cli.views import common as views
from razorctl.cli.views import comparison as view
from razorctl.config.recipe import Recipe
from razorctl.config.tasks import EVERY_FIGURE
from razorctl.errors import DataError, UsageError
from razorctl.planning.candidates import label
from razorctl.training.comparing import comparison
from razorctl.training.comparing.figures import document as document_of
from razorctl.training.comparing.figures import pareto
from razorctl.training.comparing.finished_run import read_run
from tests.comparing import assert_refused, compare, write

CONTRACT = [
    *("method", "ratio", "joint_budget", "attention", "saved_bytes", "peak_bytes"),
    *("step_seconds", "epoch_seconds", "accuracy", "accuracy_std", "memory_vs_full"),
    *("speedup_vs_full", "time_to_target", "error"),
]


def rows(*directories: Path, target: float | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document(directories, target)["rows"]
    return found


def document(directories: Iterable[Path], target: float | None = None) -> dict[str, Any]:
    return document_of(comparison.of_directories(directories), target)


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

    def test_a_run_that_could_not_be_compiled_is_named(self):
        runs = [write("a", compile=True, compiled=True), write("b", "razor", compile=True)]
        assert [row["compiled"] for row in rows(*runs)] == [True, False]
        printed = " ".join(compare("a", "b").stdout.split())
        assert "fp32, compiled, 1 seed" in printed.replace("auto", "fp32")
        assert "Not compiled: razor 0.9." in printed

    def test_rows_are_told_apart_by_what_differs(self):
        runs = [
            write("a", "razor"),
            write("b", "razor", recipe={"ratio": 0.8}),
            write("c", "razor", batch_size=32),
            write("d", "full", accumulate=4),
        ]
        labels = [row["label"] for row in rows(*runs)]
        same = [label(Recipe(ratio=ratio), 1) for ratio in (0.9, 0.8, 0.9)]
        sizes = [f"batch size {size}" for size in (16, 16, 32, 16)]
        names = [*same, label(Recipe("full"), 4)]
        assert labels == [f"{name}, {size}" for name, size in zip(names, sizes, strict=True)]

    def test_runs_are_judged_by_their_metric_or_by_the_first_of_their_task(self):
        by_f1 = write("a", figure="f1", other="accuracy", metric="f1")
        by_default = write("b", "razor", other="f1")
        found = document([by_f1, write("c", "razor", figure="f1", metric="f1")])
        assert found["metric"] == "f1"
        assert [row["score"] for row in found["rows"]] == [0.9, 0.9]
        assert found["target"] == pytest.approx(0.99 * 0.9)
        found = document([by_f1, by_default])
        assert found["metric"] == "accuracy"
        assert [row["score"] for row in found["rows"]] == [0.45, 0.9]
        assert {*EVERY_FIGURE} == {*view.SCORES}

    def test_full_is_what_has_the_same_settings_and_is_plain(self):
        runs = [
            write("a", saved=8, accumulate=4),
            write("b", saved=32),
            write("c", saved=16, recipe={"attention": "flash"}),
            write("d", saved=64, batch_size=32),
            write("e", "razor", saved=4, device="a GPU"),
        ]
        row_list = rows(*runs)
        assert [row["memory_vs_full"] for row in row_list] == [0.25, 1, 0.5, 1, None]
        assert row_list[-1]["speedup_vs_full"] is None

    def test_a_measured_peak_and_a_traced_figure_are_never_in_one_column(self):
        gpu = [write("a", peak=4000), write("b", "razor", saved=100, peak=1000)]
        found = document(gpu)
        assert found["memory"] == "peak_bytes"
        assert found["rows"][1]["memory_vs_full"] == 0.25
        mixed = document([*gpu, write("c", "int8", saved=50)])
        assert mixed["memory"] == "saved_bytes"
        assert mixed["rows"][1]["memory_vs_full"] == 0.1


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
        found = document(runs)
        assert found["target"] == pytest.approx(0.99 * 0.8)
        full, razor = found["rows"]
        assert full["time_to_target"] is None  # one seed never gets there
        assert razor["time_to_target"] == 2

    def test_of_perplexity_it_is_above_fulls_best(self):
        job = {"task": "causal-lm", "figure": "perplexity"}
        full = write("a", accuracies=(30.0, 19.8, 20.5), **job)
        found = document([full, write("b", "razor", accuracies=(30.0, 19.9, 19.7), **job)])
        assert found["target"] == pytest.approx(20)
        assert [row["time_to_target"] for row in found["rows"]] == [None, 2]


def test_pareto():
    points = [(1.0, 5.0), (2.0, 2.0), (2.0, 2.0), (2.0, 3.0), (5.0, 1.0), (5.0, 5.0)]
    assert pareto(points) == [True, True, True, False, True, False]


def test_the_best_of_each_column_and_the_front_are_marked():
    runs = [
        write("a", accuracies=(0.95,)),
        write("b", "checkpoint", saved=100, step=1.5, accuracies=(0.95,)),
        write("c", "backrazor", saved=200, step=2.0, accuracies=(0.5,)),
    ]
    found = document(runs)
    assert found["pareto"] == ["full", "checkpoint"]
    assert found["best"]["saved_bytes"] == ["checkpoint"]
    assert found["best"]["step_seconds"] == found["best"]["speedup_vs_full"] == ["full"]
    assert found["best"]["accuracy"] == ["full", "checkpoint"]
    assert found["rows"][2]["best"] == []


class TestBadRuns:
    def test_of_another_version(self):
        with pytest.raises(UsageError, match=r"run by razorctl 0\.0\.1, not .*; run it again"):
            read_run(write("a", version="0.0.1"))

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("result.json", "{"),
            ("result.json", "[]"),
            ("metrics.jsonl", '{"seconds": 1'),
            ("metrics.jsonl", ""),
            ("metrics.jsonl", '{"seconds": 1, "accuracy": 0.5}\n'),
            ("metrics.jsonl", '{"seconds": 1, "metrics": {"accuracy": 0.5}}\n' * 3),
        ],
    )
    def test_damaged(self, file, text):
        run = write("a")
        (run / file).write_text(text)
        with pytest.raises(DataError, match=f"a/{file} .*; (leave it out|copy)"):
            read_run(run)

    def test_of_another_task(self):
        runs = [write("a"), write("b", dataset="cifar10")]
        with pytest.raises(UsageError, match="b is of vit-micro on cifar10, a of vit-micro on dig"):
            rows(*runs)


@pytest.mark.parametrize("width", [60, 80, 200])
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
        "100.0",
        "GiB",
    ):
        assert part in table
    assert "…" not in table
    assert ("Left out for width: epoch, speed" in " ".join(table.split())) == (width == 60)
    assert ("epoch" in table.split("Bold")[0]) == (width > 60)
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


BAD = {
    "neither": (["nothing"], 2, "nothing is not the directory of a run or a"),
    "a run and a model": (["run", "digits"], 2, "digits is not the directory of a run"),
    "unfinished": (["run", "half"], 2, "half holds no finished run"),
    "settings of finished runs": (["run", "--steps", "3"], 2, "steps does not apply to finished"),
    "methods of finished runs": (["run", "--methods", "full"], 2, "methods does not apply to"),
    "damaged settings": (["grid"], 5, "grid/comparison.toml is not as this version of razorctl"),
    "both forms": (["run", "--json", "--csv"], 2, "give one of them"),
    "target": (["run", "--target", "95"], 2, "target 95 is above 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(case):
    args, code, sentence = BAD[case]
    write("run")
    (write("half") / "result.json").unlink()
    Path("grid").mkdir()
    Path("grid/comparison.toml").write_text("[runs]\nmethods = 'full'\n")
    assert_refused(compare(*args), code, sentence)
    assert sorted(p.name for p in Path().iterdir()) == ["grid", "half", "run"]
