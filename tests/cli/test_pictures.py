"""What `finetune` leaves to look at: curves, and held-out rows with predictions."""

import json
import signal
from pathlib import Path

import pytest
import torch
from matplotlib import font_manager
from PIL import Image

from razorctl.cli.views import examples as view
from razorctl.cli.views import plots
from razorctl.training.predicting import examples
from razorctl.training.run import Run
from tests.cli.commands import done, finetune, razorctl
from tests.cli.test_tasks import classed, numbers, several, tags
from tests.detectors import detector
from tests.own import coco, table

QUICK = ("--batch-size", "8", "--epochs", "2", "--device", "cpu", "--method", "full")


@pytest.fixture
def found(monkeypatch) -> list[examples.Examples]:
    """The examples of each run."""
    every: list[examples.Examples] = []

    def worst(run):
        every.append(stock(run))
        return every[-1]

    stock = examples.worst
    monkeypatch.setattr(examples, "worst", worst)
    return every


def mean(of: examples.Examples) -> float:
    return sum(each.error for each in of.examples) / len(of.examples)


def tokens(of: examples.Examples) -> int:
    return sum(len(each.parts[0]) for each in of.examples)


# Task -> what writes its data, the file, its figure, and this figure by 4 examples.
KINDS = {
    "classification": (classed, "a.csv", "accuracy", lambda of: 1 - of.wrong / 4),
    "multi-label": (several, "a.jsonl", "exact_match", lambda of: 1 - of.wrong / 4),
    "regression": (numbers, "a.csv", "mae", mean),
    "token-classification": (tags, "a.conll", "accuracy", lambda of: 1 - 4 * mean(of) / tokens(of)),
    "segmentation": (None, "shapes", "accuracy", lambda of: 1 - mean(of)),
}


@pytest.mark.parametrize("task", KINDS)
def test_errors_are_of_the_best_weights_and_the_worst_come_first(task, kinds, found):
    write, file, figure, by_examples = KINDS[task]
    words = [str(kinds / "resnet"), str(kinds / file)]
    if write is not None:
        write(Path(file))
        words = [str(kinds / "bert"), file]
    settings = ("--input-size", "32", *QUICK, "--evaluate-every", "1", "--out", "run")
    result = done("finetune", *words, *settings)
    (of,) = found
    assert len(of.rows) == len(of.examples) == 4
    assert by_examples(of) == pytest.approx(result["best_metrics"][figure], abs=1e-5)
    errors = [each.error for each in of.examples]
    assert errors == sorted(errors, reverse=True)
    (left,) = Path("run").glob("predictions.*")
    assert left.suffix == (".html" if write else ".png")


def test_some_of_many_rows_are_shown_and_the_same_ones_again(found, monkeypatch):
    monkeypatch.setattr(examples, "SAMPLE", 48)
    pages = list[Image.Image]()
    stock = view.picture
    monkeypatch.setattr(view, "picture", lambda of: pages.append(stock(of)) or pages[-1])
    assert finetune("--out", "run").exit_code == 0
    (of,) = found
    assert (len(of.rows), len(of.examples)) == (48, 24)
    assert of.wrong > 24
    assert all(each.wrong and each.label != each.guess.split(",")[0] for each in of.examples)
    assert examples.worst(of.run).examples == of.examples
    with Image.open("run/predictions.png") as picture:
        assert picture.tobytes() == pages[0].tobytes()
        assert picture.width == 948
        assert picture.getpixel((0, 0)) == (255, 255, 255)
    assert Image.open("run/curves.png").width == 1200


def test_objects_without_a_match_are_errors(found, monkeypatch):
    """Guessed are a bus that is there, the same one as a car, and nothing with a low score."""
    coco("coco")
    detector("yolos", Path("yolos"))

    def likeliest(guesses, extent):
        box = torch.tensor([[2.0, 3.0, 24.0, 13.0]]).expand(3, 4)
        yield {
            "boxes": box,
            "labels": torch.tensor([0, 1, 2]),
            "scores": torch.tensor([0.9, 0.8, 0.3]),
        }

    monkeypatch.setattr(examples, "likeliest", likeliest)
    words = (
        "./yolos",
        "./coco",
        *QUICK,
        "--batch-size",
        "4",
        "--validation",
        "0.5",
        "--out",
        "run",
    )
    assert razorctl("finetune", *words).exit_code == 0
    (of,) = found
    for each in of.examples:
        labels, _ = each.parts
        assert each.guess == "1 bus, 1 car"
        there = {one.label for one in labels}
        right = len(there & {"bus", "car"})
        assert (each.error, each.wrong) == (
            len(labels) + 2 - 2 * right,
            right < 2 or len(there) > 2,
        )
    assert len({each.error for each in of.examples}) > 1
    assert Image.open("run/predictions.png").width == 948


def test_texts_and_names_are_escaped(kinds):
    table(Path("a.csv"), [f"<u>{n}</u>,<i>{'ab'[n % 2]}</i>" for n in range(24)])
    words = (str(kinds / "bert"), "a.csv", *QUICK, "--input-size", "32", "--out", "run")
    assert razorctl("finetune", *words).exit_code == 0
    page = Path("run/predictions.html").read_text()
    assert "<u>" not in page
    assert "<i>" not in page
    assert "&lt;u&gt;" in page
    assert "<b>&lt;i&gt;a&lt;/i&gt;</b>" in page


def test_a_resumed_run_has_whole_curves(monkeypatch):
    drawn = list[plots.Panel]()

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_note_peak", lambda _: signal.raise_signal(signal.SIGINT))
        assert finetune("--out", "run", "--evaluate-every", "1").exit_code == 130
    assert not Path("run/curves.png").exists()
    monkeypatch.setattr(plots, "write_curves", lambda panels, file: drawn.extend(panels))
    assert razorctl("finetune", "--resume", "--out", "run").exit_code == 0
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    wanted = {
        "training loss": [step["loss"] for step in steps],
        "accuracy (%)": [100 * step["accuracy"] for step in steps],
        "learning rate": [step["learning_rate"] for step in steps],
    }
    for name, over, [[_, [curve]]] in drawn:
        assert (over, curve.steps) == ("steps", [1, 2, 3])
        assert curve.values == pytest.approx(wanted.pop(name))
    assert not wanted


def test_a_picture_that_cannot_be_drawn_is_a_warning(monkeypatch, caplog):
    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(view, "picture", fails)
    result = finetune("--out", "run")
    assert result.exit_code == 0
    assert "run lacks a picture ([Errno 28] No space left on device)" in caplog.text
    assert {file.name for file in Path("run").glob("*.png")} == {"curves.png"}
    assert not [*Path("run").glob(".razorctl*")]


def test_letters_that_the_font_lacks_are_of_an_installed_one(monkeypatch, tmp_path):
    """If one has them: here fonts of matplotlib stand for installed ones."""

    def name(text: str) -> str:
        return Path(view._font(text).path).stem

    folder, broken = Path(view._font("cat").path).parent, tmp_path / "broken.ttf"
    broken.write_text("no font")
    files = [folder / f"{font}.ttf" for font in ("LastResortHE-Regular", "STIXNonUni", "cmr10")]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(broken), *map(str, files)])
    assert name("cat, кот") == name(chr(0x10FFFD)) == "DejaVuSans"  # which none has
    assert name(chr(0xE000)) == "STIXNonUni"
