"""A user's own data in commands: what is detected, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from razorctl.cli.views import common as views
from tests.cli.commands import razorctl
from tests.own import photos

QUICK = ["--device", "cpu", "--steps", "2", "--batch-size", "4", "--out", "run"]


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.6)])


BEFORE_DATA = {
    "a method": ["finetune", "--method", "raz"],
    "an attention": ["finetune", "--attention", "flush"],
    "a card": ["finetune", "--gpu", "rtx-1"],
    "a metric of another task": ["finetune", "--task", "regression", "--metric", "f1"],
    "a directory that is there": ["finetune", "--out", "."],
    "a card to plan for": ["plan", "--gpu", "rtx-1"],
    "methods to compare": ["compare", "--methods", "full,raz"],
    "a directory for a comparison": ["compare", "--out", "."],
}


@pytest.mark.parametrize("case", BEFORE_DATA)
def test_names_are_checked_before_data_are_read(case):
    command, *words = BEFORE_DATA[case]
    result = razorctl(command, "vit-micro", "./none.csv", *words)
    assert result.exit_code == 2
    assert "none.csv" not in result.stderr
    assert words[-1].split(",")[-1] in result.stderr


def test_bad_rows_are_left_out_with_one_note():
    photos(Path("d"))
    truncate(Path("d/bus/1.jpg"))
    Path("d/van").mkdir()
    args = ["--validation", "0.25", "--skip-bad", "--json", "--evaluate-every", "2"]
    result = razorctl("finetune", "vit-micro", "d", *QUICK, *args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[:4] == [
        "reading d ...",
        "d: a folder for each class",
        "3 classes: bus, car, tram",
        "8 rows to train on, 3 held out for validation",
    ]
    assert (
        "note: 2 bad rows are left out; run/split.json has their numbers:\n"
        "  van (a class folder without images)\n  bus/1.jpg ("
    ) in result.stderr
    document = json.loads(result.stdout)
    assert document["split"] == "validation"
    assert "validation_accuracy" not in document
    assert document["job"]["skip_bad"] is True
    record = json.loads(Path("run/split.json").read_text())
    assert record["skipped"] == {"d": [1]}
    assert (record["validation"], record["seed"], len(record["rows"])) == (0.25, 0, 3)


@pytest.mark.parametrize("command", ["finetune", "evaluate", "predict"])
def test_the_first_of_many_bad_rows_are_named(command, tmp_path):
    photos(Path("d"), 20)
    trained = ["--validation", "0.25", "--skip-bad", "--evaluate-every", "2"]
    if command != "finetune":
        assert razorctl("finetune", "vit-micro", "d", *QUICK, *trained).exit_code == 0
    for i in range(13):
        Path(f"d/car/{i}.jpg").write_bytes(b"")
    words = ["finetune", "vit-micro", "d", *QUICK, *trained]
    if command != "finetune":
        words = [command, "run", "d", "--device", "cpu", "--skip-bad"]
    result = razorctl(*words)
    assert result.exit_code == 0, result.stderr
    said = result.stderr.splitlines()
    at = next(i for i, line in enumerate(said) if line.startswith("note: 13 bad rows are left out"))
    named = sorted(f"car/{i}.jpg" for i in range(13))[:10]
    assert [line.split()[0].removeprefix("d/") for line in said[at + 1 : at + 11]] == named
    assert said[at + 11] == "  and 3 more"


def test_the_test_split_is_evaluated_once_at_the_end():
    for split in ("train", "val", "test"):
        photos(Path("d", split))
    result = razorctl("finetune", "vit-micro", "./d", *QUICK, "--evaluate-every", "1")
    assert result.exit_code == 0, result.stderr
    assert "12 rows to train on, 12 for validation, 12 for test" in result.stderr
    assert "validation accuracy" in result.stdout
    assert "test accuracy" in result.stdout
    document = json.loads(Path("run/result.json").read_text())
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert document["split"] == "test"
    assert document["validation_loss"] == last["test_loss"]
    assert document["validation_accuracy"] == last["accuracy"]
    # The images are the same, and the last weights are those of the last evaluation.
    assert document["loss"] == pytest.approx(document["validation_loss"])
    record = json.loads(Path("run/split.json").read_text())
    assert (record.keys(), record["digests"].keys()) == (
        {"digests"},
        {"train", "validation", "test"},
    )


def test_paths_in_titles_are_relative_inside_the_working_directory():
    below, beside = Path.cwd() / "d" / "e", Path.cwd().parent / "f"
    shown = [views.title("vit-micro", str(name)) for name in (below, beside, "digits")]
    assert shown == ["vit-micro on ./d/e", f"vit-micro on {beside}", "vit-micro on digits"]
    assert views.title(str(below), str(below)) == "./d/e on ./d/e"


def test_registered_names_win_unless_a_separator_is_typed():
    photos(Path("digits"))
    words = ["plan", "vit-micro", "--gpu", "t4", "--batch-size", "4", "--max-ratio", "0.5"]
    assert "classes" not in razorctl(*words, "digits").stderr
    assert "3 classes: bus, car, tram" in razorctl(*words, f".{os.sep}digits").stderr
