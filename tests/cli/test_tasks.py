"""Tasks whose labels are no single classes, through the commands and as transformers loads them."""

import json
import random
import re
from pathlib import Path

import pytest
from PIL import Image
from transformers import pipeline

from tests.cli.commands import done, razorctl
from tests.cli.kinds import WORDS

QUICK = ("--device", "cpu", "--input-size", "32", "--batch-size", "8", "--lr", "0.01")


def sentences() -> list[list[str]]:
    draw = random.Random(0)
    return [draw.choices(WORDS, k=3 + i % 7) for i in range(40)]


def numbers(file: Path) -> None:
    """Texts with an age of 20 to 65, by the share of words whose numbers are even."""
    even = [sum(int(word[1:]) % 2 == 0 for word in words) / len(words) for words in sentences()]
    rows = [
        f"{' '.join(words)},{20 + 45 * share:.3f}"
        for words, share in zip(sentences(), even, strict=True)
    ]
    file.write_text("\n".join(["text,score", *rows]) + "\n")


def several(file: Path) -> None:
    """Texts with a label for each of three words that they have."""
    rows = [
        {"text": " ".join(words), "labels": [word for word in WORDS[:3] if word in words]}
        for words in sentences()
    ]
    file.write_text("\n".join(map(json.dumps, rows)))


def tags(file: Path) -> None:
    """Sentences in which a word of an odd number and the next one are an entity."""
    lines = []
    for words in sentences():
        odd = [int(word[1:]) % 2 for word in words]
        for number, word in enumerate(words):
            kind = "B-ODD" if odd[number] else "I-ODD" if number and odd[number - 1] else "O"
            lines.append(f"{word} {kind}")
        lines.append("")
    file.write_text("\n".join(lines))


def by_transformers(task: str, texts: list, **settings):
    return pipeline(task, "run", tokenizer="run", device="cpu", **settings)(texts)


def check_numbers(config: dict, file: str) -> None:
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "score"})
    texts = [" ".join(words) for words in sentences()]
    theirs = by_transformers("text-classification", texts, function_to_apply="none")
    values = [row["value"] for row in predictions(file)]
    assert 20 < min(values) < max(values) < 65
    assert values == pytest.approx([each["score"] for each in theirs], rel=1e-4, abs=1e-5)
    result = razorctl("predict", "run", file, "--device", "cpu")
    assert result.stdout.startswith(f"file,row,value\n{file},0,{values[0]:.6g}\n")
    assert razorctl("predict", "run", file, "--top", "2").exit_code == 2


def check_several(config: dict, file: str) -> None:
    assert config["problem_type"] == "multi_label_classification"
    assert [*config["id2label"].values()] == WORDS[:3]
    texts = [" ".join(words) for words in sentences()]
    theirs = by_transformers("text-classification", texts, top_k=None)
    ours = predictions(file, "--probabilities")
    for own, their in zip(ours, theirs, strict=True):
        chances = {each["label"]: each["score"] for each in their}
        assert own["probabilities"] == pytest.approx(chances, rel=1e-4)
        assert own["labels"] == [name for name in WORDS[:3] if chances[name] >= 0.5]
    result = razorctl("predict", "run", file, "--device", "cpu")
    first = f"{file},0,{'|'.join(ours[0]['labels'])}"
    assert result.stdout.splitlines()[:2] == ["file,row,labels", first]
    assert len(done("evaluate", "run", "--device", "cpu")["by_class"]["f1"]) == 3


def check_tags(config: dict, file: str) -> None:
    names = ["O", "B-ODD", "I-ODD"]
    assert [*config["id2label"].values()] == names
    long = ["w1", "w2"] * 40  # more than the model takes at once
    rows = [*sentences(), long]
    Path("texts.txt").write_text("\n".join(" ".join(words) for words in rows))
    ours = predictions("texts.txt")
    assert [row["tokens"] for row in ours] == rows
    assert [len(row["tags"]) for row in ours] == [len(words) for words in rows]
    assert [row["tags"] for row in predictions(file)] == [row["tags"] for row in ours[:-1]]
    theirs = by_transformers(
        "token-classification", [" ".join(words) for words in sentences()], ignore_labels=[]
    )
    for own, their in zip(ours, theirs, strict=False):
        assert own["tags"] == [each["entity"] for each in their]
    result = razorctl("predict", "run", file, "--device", "cpu")
    first = f"{file},0,{' '.join(ours[0]['tokens'])},{' '.join(ours[0]['tags'])}"
    assert result.stdout.splitlines()[:2] == ["file,row,tokens,tags", first]


# Task -> what writes its data, the file, the figure by which it is judged, and what checks a run.
TASKS = {
    "regression": (numbers, "a.csv", "mse", check_numbers),
    "multi-label": (several, "a.jsonl", "mean_average_precision", check_several),
    "token-classification": (tags, "a.conll", "f1", check_tags),
}


def predictions(file: str, *options: str) -> list[dict]:
    return done("predict", "run", file, "--device", "cpu", *options)["predictions"]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_its_figures_and_its_predictions(task, kinds):
    write, file, metric, check = TASKS[task]
    write(Path(file))
    settings = *QUICK, "--epochs", "2", "--ratio", "0.5", "--out", "run"
    result = done("finetune", str(kinds / "bert"), file, *settings)
    assert (result["job"]["task"], result["metric"]) == (task, metric)
    assert result["saved_bytes"] <= 0.5 * result["full_saved_bytes"]
    evaluated = done("evaluate", "run", "--device", "cpu", "--weights", "last")
    assert evaluated["metrics"] == pytest.approx(result["metrics"], rel=1e-4)
    assert done("evaluate", "run", file, "--device", "cpu")["rows"] == 40  # named, all rows count
    compared = done("compare", "run", "--html", "report.html")
    assert compared["metric"] == metric
    assert compared["rows"][0]["score"] == result["metrics"][metric]
    assert "<img" in Path("report.html").read_text()
    for words in (["compare", "run"], ["evaluate", "run", "--device", "cpu"]):
        assert razorctl(*words).exit_code == 0
    check(json.loads(Path("run/config.json").read_text()), file)


def classed(file: Path) -> None:
    rows = [
        f"{' '.join(words)},{'even' if len(words) % 2 == 0 else 'odd'}" for words in sentences()
    ]
    file.write_text("\n".join(["text,label", *rows]))


# Task -> what writes its data, if it is not there, the file, the model, and the form of a row.
SHOWN = {
    "classification": (classed, "a.csv", "bert", r"(w\d+ ?)+ -> (even|odd)"),
    "regression": (numbers, "a.csv", "bert", r"(w\d+ ?)+ -> \d\d(\.\d+)?"),
    "multi-label": (several, "a.jsonl", "bert", r"(w\d+ ?)+ -> (no label|w\d+(, w\d+)*)"),
    "token-classification": (tags, "a.conll", "bert", r"(w\d+/(O|[BI]-ODD) ?)+"),
    "causal-lm": (None, "texts.txt", "gpt2", r"((w\d+|</s>) ?)+(\.\.\.)?"),
    "images": (None, "digits", "vit-micro", r"image of \d+ x \d+ x \d+ -> \d"),
    "segmentation": (None, "shapes", "segformer", r"image of 3 x \d+ x \d+ -> .*no label 1\d.* %"),
}


@pytest.mark.parametrize("task", SHOWN)
def test_a_dry_run_shows_two_rows_as_they_are_learned(task, kinds):
    write, file, model, form = SHOWN[task]
    if write is not None:
        write(Path(file))
    data = file if write is not None or file == "digits" else str(kinds / file)
    model = model if model == "vit-micro" else str(kinds / model)
    words = ("finetune", model, data, "--dry-run", "--device", "cpu", "--method", "full")
    small = () if model == "vit-micro" else ("--input-size", "32", "--batch-size", "4")
    result = razorctl(*words, *small)
    assert result.exit_code == 0, result.stderr
    first, second, last = result.stdout.splitlines()
    assert last.startswith("dry run of ")
    for number, line in enumerate((first, second), 1):
        assert re.fullmatch(f"row {number}: {form}", line), line
    if task == "regression":
        assert len(done(*words, *small)["rows"]) == 2


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_images(task):
    draw = random.Random(0)
    shades = [(draw.randrange(256), draw.randrange(2)) for _ in range(24)]
    rows = [
        f"{i}.png,{shade / 255:.3f},{int(shade > 128)},{dark}"
        for i, (shade, dark) in enumerate(shades)
    ]
    for i, (shade, dark) in enumerate(shades):
        Image.new("L", (28, 28), shade // (1 + dark)).save(f"{i}.png")
    Path("a.csv").write_text("\n".join(["image,share,light,dark", *rows]))
    columns = "share" if task == "regression" else "light,dark"
    settings = "--device", "cpu", "--steps", "3", "--batch-size", "8", "--ratio", "0.5"
    named = "--label-column", columns, "--out", "run"
    result = done("finetune", "vit-micro", "a.csv", *settings, *named)
    assert result["job"]["task"] == task
    assert json.loads(Path("run/config.json").read_text())["label_names"] == columns.split(",")
    figures = done("evaluate", "run", "--device", "cpu", "--weights", "last")["metrics"]
    assert figures == pytest.approx(result["metrics"], rel=1e-4)
    assert all(
        ("value" if task == "regression" else "labels") in row for row in predictions("a.csv")
    )
