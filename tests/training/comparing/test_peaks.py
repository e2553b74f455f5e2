"""Peaks of a comparison: traced of runs without a card, and whether they fit a memory."""

import json
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import tomli_w

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory.trace_cache import Cache
from razorctl.planning.cached_traces import cached_trace, job_facts
from razorctl.system import documents
from razorctl.training.comparing import peaks
from tests.comparing import assert_refused, compare, write

GIVEN = {"precision": "fp32", "optimizer": "sgd", "batch_size": 512, "steps": 3}
MIB = 2**20


def resolved(**settings: object) -> Job:
    job = Job("vit-micro", "digits", **GIVEN | settings)
    return job.resolved(job_facts(job)["defaults"], None)


@pytest.fixture
def runs(traces, monkeypatch) -> list[str]:
    """Two seeds of full and one of razor, which are as accurate, and as fast."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))
    for seed in (0, 1):
        job = asdict(resolved(seed=seed)) | {"accuracies": (None, 0.9 + seed / 100)}
        write(f"f{seed}", **job)
        write(f"r{seed}", "razor", **job)
    return ["f0", "f1", "r0", "r1"]


def test_a_peak_is_traced_once_for_all_seeds_as_plan_traces_it(runs, monkeypatch):
    counted = Mock(side_effect=cached_trace)
    monkeypatch.setattr(peaks, "cached_trace", counted)
    document = json.loads(compare(*runs, "--json").stdout)
    assert [call.args[1].method for call in counted.call_args_list] == ["full", "razor"]
    assert (document["memory"], document["budget_bytes"]) == ("traced_peak_bytes", None)
    full, razor = document["rows"]
    for row, method in ((full, "full"), (razor, "razor")):
        peak = cached_trace(resolved(), Recipe(method), 10, Cache()).highest
        assert row["traced_peak_bytes"] == peak
        assert row["needed_bytes"] == pytest.approx(1.04 * peak + 640 * MIB, abs=1)
        assert (row["peak_bytes"], row["fits"], row["loss"]) == (None, None, 1)
    assert razor["memory_vs_full"] == razor["traced_peak_bytes"] / full["traced_peak_bytes"]


def test_a_run_of_an_earlier_release_has_the_defaults_of_later_settings(runs):
    file = Path("r0/result.json")
    document = json.loads(file.read_text())
    del document["job"]["schedule"], document["job"]["max_rows"]
    file.write_text(json.dumps(documents.sealed(document)))
    write(
        "linear", "razor", **asdict(resolved()) | {"schedule": "linear", "accuracies": (0.9, 0.9)}
    )
    taken = [json.loads(compare("f0", run, "--json").stdout)["take"] for run in ("r0", "linear")]
    assert [advice["label"] is None for advice in taken] == [False, True]


def test_what_does_not_fit_is_marked_and_not_taken(runs):
    result = compare(*runs, "--vram", "1GB", "--html", "report.html")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert text.count("does not fit") == 3  # in the table, the notes and the advice
    assert "Memory: peak, traced for a step on a card." in text
    assert "peak + 4 % for fragmentation + 640 MiB for the CUDA context exceed 1.0 GiB." in text
    assert "Take razor 0.9: razor 0.9 and full tie in accuracy (2 seeds);" in text
    page = Path("report.html").read_text("utf-8")
    assert 'full<br><span style="color:#e5484d">does not fit</span>' in page
    assert "peak, traced<br>MiB" in page
    assert "razorctl compare f0 f1 r0 r1 --vram 1GB --html report.html" in page
    full, razor = json.loads(compare(*runs, "--vram", "1GB", "--json").stdout)["rows"]
    assert (full["fits"], razor["fits"]) == (False, True)
    nothing = compare(*runs, "--vram", "600MB")
    assert nothing.exit_code == 3
    assert "No choice yet: no method fits 600 MiB; razor 0.9 needs the least, " in nothing.stdout


def test_a_measured_peak_comes_before_a_traced_one(monkeypatch):
    monkeypatch.setattr(peaks, "traced_peaks", None)
    write("a", peak=4 * 2**30)
    write("b", "razor", peak=10 * 2**30)
    document = json.loads(compare("a", "b", "--gpu", "rtx-4060", "--json").stdout)
    assert document["memory"] == "peak_bytes"
    assert [row["fits"] for row in document["rows"]] == [True, False]
    assert document["budget_bytes"] == 8188 * MIB
    text = " ".join(compare("a", "b", "--gpu", "rtx-4060", "--vram", "4GB").stdout.split())
    assert "Memory: peak, measured." in text
    assert "no method fits 4.0 GiB; full needs the least, 4.8 GiB" in text


def test_runs_whose_data_are_gone_have_no_peak(tmp_path):
    write("a", dataset=str(tmp_path / "gone"))
    result = compare("a", "--vram", "1GB")
    assert result.exit_code == 0
    assert "note: peaks are not traced: " in result.stderr
    assert "Memory: stored." in " ".join(result.stdout.split())
    assert "No choice yet: the peaks are not known." in result.stdout


def test_of_a_list_the_best_setting_that_fits_is_taken(traces, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))
    for size, score in ((16, 0.8), (32, 0.85), (512, 0.9)):
        job = asdict(resolved(batch_size=size))
        write(f"grid/full-batch-size-{size}-0", accuracies=(None, score), **job)
    runs = {"methods": ["full"], "seeds": [0], "lists": {"batch_size": [16, 32, 512]}}
    tables = {"job": {"model": "vit-micro", "dataset": "digits"}, "recipe": {"ratio": 0.9}}
    Path("grid/comparison.toml").write_text(tomli_w.dumps({**tables, "runs": runs}))
    taken = json.loads(compare("grid", "--vram", "1GB", "--json").stdout)["take"]
    why = "the best of 2 settings that fit 1.0 GiB (1 seed)"
    assert taken == {"label": "full, batch size 32", "why": why}
    nothing = compare("grid", "--vram", "600MB").stdout
    assert "no method fits 600 MiB; full, batch size 16 needs the least" in nothing


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--vram", "lots"], "'lots' is not a size of memory"),
        (["--gpu", "rtx-4061"], "did you mean 'rtx-4060'?"),
        (["--gpu", "rtx-4060", "--vram", "24GB"], "has 8.0 GiB; ask for no more than that"),
    ],
)
def test_a_bad_memory_is_refused_before_a_run(args, sentence):
    assert_refused(compare("vit-micro", "digits", *args), 2, sentence)
    assert not list(Path().iterdir())
