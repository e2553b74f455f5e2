"""The option --streaming."""

import json
from pathlib import Path

import pytest

from razorctl.errors import DataError
from razorctl.job import Job
from razorctl.training import evaluation_rows, run_files
from tests.cli.commands import razorctl
from tests.own import CLASSES, photos, table

QUICK = ["--device", "cpu", "--steps", "4", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def images():
    """A folder of photographs and their tables, one with a row that is bad."""
    photos(Path("d"))
    rows = [f"{name}/{i}.jpg,{name}" for name in CLASSES for i in range(4)]
    table(Path("d/test.csv"), rows, "image,label")
    table(Path("d/train.csv"), [*rows, "bus/9.jpg,bus"], "image,label")


def test_a_streamed_run_skips_what_is_bad_and_says_so():
    args = ["vit-micro", "d", *QUICK, "--streaming"]
    refused = razorctl("finetune", *args, "--out", "run")
    assert refused.exit_code == 5
    assert "d has 1 bad row: train.csv, line 14 (missing); correct it, or" in refused.stderr
    result = razorctl("finetune", *args, "--skip-bad", "--json", "--out", "other")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[:4] == [
        "reading d ...",
        "d: image in image, label in label, streamed",
        "3 classes: bus, car, tram",
        "13 rows to train on, 12 for test",
    ]
    assert "note: 2 bad rows are left out, counted each time that rows were read:" in result.stderr
    document = json.loads(result.stdout)
    assert (document["split"], document["job"]["streaming"]) == ("test", True)
    assert not Path("other/split.json").exists()


def test_plan_and_compare_take_streams(runs_here):
    args = ["vit-micro", "d", "--streaming", "--skip-bad", "--batch-size", "4"]
    planned = razorctl("plan", *args, "--gpu", "t4", "--max-ratio", "0.5", "--json")
    assert planned.exit_code == 0, planned.stderr
    document = json.loads(planned.stdout)
    assert document["steps_per_epoch"] == 3
    assert "--streaming" in document["command"]
    grid = [*args, "--steps", "1", "--device", "cpu", "--methods", "full", "--json"]
    result = razorctl("compare", *grid)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["rows"][0]["accuracy"] is not None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digits", "digits is read as a whole; leave --streaming out"),
        ("photos", "photos is a folder of images, which are read as they come anyway; leave"),
        ("d/train.csv", "d/train.csv has no validation or test split"),
    ],
)
def test_what_cannot_be_streamed_is_refused(name, sentence):
    photos(Path("photos"))
    result = razorctl("finetune", "vit-micro", name, *QUICK, "--streaming")
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_other_data_that_a_streamed_run_is_evaluated_on_are_read_as_a_whole(monkeypatch):
    job = Job("vit-micro", "d", streaming=True, split="train,,test", skip_bad=True)
    wanted = []

    def rows(run, job, *rest):
        wanted.append(job)
        raise DataError("no rows")

    monkeypatch.setattr(run_files, "finished_run", lambda run: ({}, job))
    monkeypatch.setattr(evaluation_rows, "rows_of_job", rows)
    razorctl("evaluate", ".", "other")
    assert wanted == [Job("vit-micro", "other")]
