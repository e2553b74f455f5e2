"""Tasks whose labels are no single classes, through the commands and as transformers loads them."""

import json
import random
from pathlib import Path

import pytest
from transformers import pipeline

from tests.cli.commands import razorctl
from tests.cli.kinds import WORDS

QUICK = ("--device", "cpu", "--input-size", "32", "--batch-size", "8", "--lr", "0.01")


def done(*args: str) -> dict:
    result = razorctl(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def sentences(count: int) -> list[list[str]]:
    draw = random.Random(0)
    return [draw.choices(WORDS, k=3 + i % 7) for i in range(count)]


def numbers(file: Path) -> None:
    """Texts with the share of words whose numbers are even."""
    rows = [
        f"{' '.join(words)},{sum(int(word[1:]) % 2 == 0 for word in words) / len(words):.3f}"
        for words in sentences(40)
    ]
    file.write_text("\n".join(["text,score", *rows]) + "\n")


# Task -> what writes its data, the file, and the figure by which it is judged.
TASKS = {"regression": (numbers, "a.csv", "pearson")}


@pytest.fixture(params=TASKS)
def case(request):
    write, file, metric = TASKS[request.param]
    write(Path(file))
    return request.param, file, metric


def test_a_run_its_evaluation_and_its_report(case, kinds):
    task, file, metric = case
    rows = [str(kinds / "bert"), file]
    planned = done("plan", *rows, "--gpu", "t4", *QUICK[2:-2], "--max-ratio", "0.5")
    assert {way["method"] for way in planned["candidates"]} >= {"full", "razor"}
    result = done("finetune", *rows, *QUICK, "--epochs", "2", "--ratio", "0.5", "--out", "run")
    assert (result["job"]["task"], result["metric"]) == (task, metric)
    assert result["saved_bytes"] <= 0.5 * result["full_saved_bytes"]
    evaluated = done("evaluate", "run", "--device", "cpu", "--weights", "last")
    assert evaluated["metrics"] == pytest.approx(result["metrics"], rel=1e-4)
    other = done("evaluate", "run", file, "--device", "cpu")  # named, all rows count
    assert other["rows"] == 40
    compared = done("compare", "run", "--html", "report.html")
    assert compared["metric"] == metric
    assert compared["rows"][0]["score"] == result["metrics"][metric]
    assert "</svg>" in Path("report.html").read_text()
    for words in (["compare", "run"], ["evaluate", "run", "--device", "cpu"]):
        shown = razorctl(*words)
        assert shown.exit_code == 0, shown.stderr


def trained(case, kinds) -> str:
    """A run of few steps, and its data."""
    _, file, _ = case
    steps = "--steps", "4", "--method", "full"
    done("finetune", str(kinds / "bert"), file, *QUICK, *steps, "--out", "run")
    return file


def by_transformers(task: str, **settings):
    return pipeline(task, "run", tokenizer="run", device="cpu", **settings)


@pytest.mark.parametrize("case", ["regression"], indirect=True)
def test_numbers_are_those_of_transformers(case, kinds):
    file = trained(case, kinds)
    config = json.loads(Path("run/config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "score"})
    texts = [" ".join(words) for words in sentences(40)]
    theirs = by_transformers("text-classification", function_to_apply="none")(texts)
    ours = done("predict", "run", file, "--device", "cpu")["predictions"]
    values = [row["value"] for row in ours]
    assert values == pytest.approx([each["score"] for each in theirs], rel=1e-4, abs=1e-5)
    result = razorctl("predict", "run", file, "--device", "cpu")
    assert result.stdout.startswith(f"file,row,value\n{file},0,{values[0]:.6g}\n")
    assert razorctl("predict", "run", file, "--top", "2").exit_code == 2
