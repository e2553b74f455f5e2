"""The loading of rows: threads, rows that stay in memory, and images that cannot be read."""

import os
from pathlib import Path

import pytest
import torch

from razorctl.config.job import Job
from razorctl.data.own import whole
from razorctl.errors import DataError
from razorctl.training import loading
from razorctl.training.loading import CachedRows, Loader
from razorctl.training.predicting import inference, labels
from razorctl.training.run import finetune
from tests.own import CLASSES, picture


class Counting:
    """Rows that are the number of threads of torch while they are read; the last one is bad."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        if number == 4:
            raise OSError("a disk is gone")
        return torch.get_num_threads()


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_rows_are_loaded_with_one_thread_and_all_else_has_its_own(three_threads):
    loaded = iter(Loader(Counting(), batch_size=2))
    for _ in range(2):
        assert next(loaded).tolist() == [1, 1]
        assert torch.get_num_threads() == 3
    with pytest.raises(DataError, match=r"a row \(a disk is gone\) cannot be read any more"):
        next(loaded)
    assert torch.get_num_threads() == 3


def test_each_pass_reads_all_rows_again(three_threads):
    loader = Loader(range(5), batch_size=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
        assert torch.get_num_threads() == 3


class Made:
    """Rows that count how often they are made."""

    def __init__(self, inputs):
        self.inputs, self.made = inputs, []

    def __len__(self):
        return len(self.inputs)

    def __getitems__(self, numbers):
        self.made += numbers
        return [{"inputs": self.inputs[number], "labels": number} for number in numbers]


def test_images_are_made_once_as_far_as_there_is_room(monkeypatch):
    monkeypatch.setattr(loading, "ROOM", 2 * 12)
    rows = Made(torch.arange(9.0).view(3, 3))
    cached = CachedRows(rows)
    for numbers in ([0, 2], [2, 1, 0], [1, 2]):
        found = cached.__getitems__(numbers)
        assert [row["labels"] for row in found] == numbers
        assert torch.equal(torch.stack([row["inputs"] for row in found]), rows.inputs[numbers])
    assert rows.made == [0, 2, 1, 1]
    assert len(cached) == 3


def test_texts_are_made_anew():
    rows = Made([{"input_ids": torch.ones(4)}])
    kept = CachedRows(rows)
    for _ in range(2):
        kept.__getitems__([0])
    assert rows.made == [0, 0]


def damage(file: Path) -> None:
    """Overwrites the end of a file; its size and time stay."""
    status, content = file.stat(), file.read_bytes()
    file.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def trained(folder: Path) -> None:
    run = finetune(Job("vit-micro", str(folder), batch_size=4, steps=9), out="run", device="cpu")
    damage(folder / "car/0.png")
    list(run)


def augmented(folder: Path) -> None:
    job = Job("vit-micro", str(folder), batch_size=4, steps=9, augment="crop")
    run = finetune(job, out="run", device="cpu")
    damage(folder / "car/0.png")
    list(run)


def evaluated(folder: Path) -> None:
    list(finetune(Job("vit-micro", str(folder), batch_size=4, steps=1), out="run", device="cpu"))
    model = inference.load("run", device="cpu")
    rows, *_ = whole.labeled(Job("vit-micro", str(folder)), "image", ("bus", "car", "tram"))
    damage(folder / "car/0.png")
    model.evaluate(rows)


def predicted(folder: Path) -> None:
    list(finetune(Job("vit-micro", str(folder), batch_size=4, steps=1), out="run", device="cpu"))
    model = inference.load("run", device="cpu")
    parts, _ = whole.unlabeled([str(folder)], Job("vit-micro", ""), "image")
    damage(folder / "car/0.png")
    list(labels.predict_labels(model, parts))


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    ("use", "processes"), [(trained, 1), (augmented, 0), (evaluated, 0), (predicted, 0)]
)
def test_an_image_that_was_damaged_after_its_check_is_named(use, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in CLASSES:
        for i in range(4):
            picture(tmp_path / "d" / name / f"{i}.png", 9 * i, (40, 40))
    if processes:
        monkeypatch.setattr(loading, "workers", lambda *_, **__: {"num_workers": processes})
    named = r"d/car/0.png \(damaged: .*\) cannot be read any more; restore it, and run again\.$"
    with pytest.raises(DataError, match=named):
        use(tmp_path / "d")
