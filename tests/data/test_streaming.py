"""Rows that are read as they come: their order, their checks, and runs that go on with them."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset
from PIL import Image

from razorctl import data, models
from razorctl.data.own import stream
from razorctl.errors import DataError, UsageError
from razorctl.job import Job
from razorctl.training import loading
from razorctl.training.loading import Loading
from tests import local_hub
from tests.own import floats, photos, table, texts
from tests.training.runs import begin, resume, same

TEXTS = Job("bert-base", "d", batch_size=4, steps=7, save_every=1, streaming=True)
PICTURES = replace(TEXTS, model="vit-micro", augment="crop", accumulate=2)

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(models.models(), "bert-base", local_hub.ENTRIES["bert-base"])


def jpeg(shade: int) -> bytes:
    file = BytesIO()
    Image.new("L", (9, 9), shade).save(file, "JPEG")
    return file.getvalue()


def pictures(folder: Path, count: int = 14, bad: int | None = None) -> None:
    """Two tables of training images and one of tests; images and labels tell the rows apart."""
    folder.mkdir()
    for name, first in (("train-0", 0), ("train-1", count), ("test", 0)):
        rows = [
            {"image": {"bytes": jpeg(8 * i), "path": None}, "label": "ab"[i % 2]}
            for i in range(first, first + count)
        ]
        if bad is not None and name == "train-1":
            rows[bad]["image"]["bytes"] = b"no JPEG"
        Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")


def csvs(folder: Path) -> None:
    for split in ("train", "val", "test"):
        texts(folder / f"{split}.csv", 18)


def test_a_stream_has_the_rows_of_the_tables():
    csvs(Path("d"))
    whole, streamed = (data.of(replace(TEXTS, streaming=s)) for s in (False, True))
    assert (streamed.classes, streamed.train_examples, streamed.test_examples) == (2, 18, 18)
    assert streamed.details[0].endswith("label in label, streamed")
    assert whole.details[1:] == streamed.details[1:]
    expected, found = whole.load(), streamed.load()
    assert found.classes == expected.classes
    for split in ("train", "validation", "test"):
        rows = [row.values for row in getattr(found, split).in_order()]
        assert rows == list(getattr(expected, split))


def test_parquet_has_its_labels_by_name_or_number():
    for name, kind in {"named": ClassLabel(names=["no", "yes"]), "plain": None}.items():
        rows = Dataset.from_dict({"text": ["a b"] * 6, "label": [1, 0] * 3})
        rows = rows if kind is None else rows.cast_column("label", kind)
        for split in ("train", "test"):
            Path(name).mkdir(exist_ok=True)
            rows.to_parquet(f"{name}/{split}.parquet")
        splits = data.of(replace(TEXTS, dataset=name)).load()
        assert splits.classes == (("no", "yes") if kind else ("0", "1"))
        assert [row.values["label"] for row in splits.test.in_order()] == [1, 0] * 3


def order(job: Job, taken: int = 0, steps: int = 14) -> list[list[float]]:
    """The mean of each image of some steps: rows that are told apart, and how they are drawn."""
    rows = data.of(job).load().train
    transform = models.find("vit-micro").augmented(models.find("vit-micro").bare(2), None, "crop")
    loads = Loading(rows.with_transform(transform), job, torch.device("cpu"))
    if taken:
        loads.begun = (taken // 7, taken // 7 * 7)
    batches = loads.batches(taken)
    return [
        [x.mean().item() for micro in next(batches) for x in micro["inputs"]] for _ in range(steps)
    ]


def test_the_order_depends_on_seed_and_epoch_alone():
    pictures(Path("d"))
    first = order(PICTURES)
    assert order(PICTURES) == first
    assert order(PICTURES, taken=5, steps=9) == first[5:]
    assert order(PICTURES, taken=9, steps=5) == first[9:]
    assert order(replace(PICTURES, seed=1)) != first
    epochs = [[x for step in first[e : e + 7] for x in step] for e in (0, 7)]
    assert epochs[0] != epochs[1]
    assert all(len(set(epoch)) > 20 for epoch in epochs)


def test_every_epoch_has_each_row_once():
    pictures(Path("d"))
    rows = data.of(PICTURES).load().train
    reads = [[row.values["image"] for row in rows.shuffled(3, epoch)] for epoch in (0, 1)]
    assert Counter(reads[0]) == Counter(reads[1])
    assert len(set(reads[0])) == 28
    assert reads[0] != reads[1]
    assert [r.values["image"] for r in rows.shuffled(3, 1, first=9)] == reads[1][9:]


@pytest.mark.parametrize("job", [PICTURES, TEXTS], ids=["images", "texts"])
def test_a_stream_is_resumed_with_the_same_bits(job, tmp_path, hub):
    (pictures if job is PICTURES else csvs)(Path("d"))
    if job is TEXTS:
        local_hub.cache_model(hub, "bert-base")
        job = replace(job, epochs=2.0, steps=None)  # of four whole batches each
    run = begin(tmp_path / "run", job)
    for taken in run:
        if taken.step in (2, 4, 5):
            shutil.copytree(tmp_path / "run", tmp_path / str(taken.step))
    assert len(run.history) == (8 if job.steps is None else 7)
    for step in (2, 4, 5):
        again = resume(tmp_path / str(step), job)
        list(again)
        assert [s.loss for s in again.history] == [s.loss for s in run.history]
        assert same(tmp_path / str(step) / "model.safetensors", tmp_path / "run/model.safetensors")


def test_bad_rows_are_left_out_of_every_epoch(tmp_path):
    pictures(Path("d"), bad=3)
    with pytest.raises(DataError, match=r"1 bad row: train-1.parquet, row 3 \(no image\); correct"):
        order(PICTURES)
    job = replace(PICTURES, skip_bad=True, steps=14)
    run = begin(tmp_path / "run", job)
    for taken in run:  # six whole batches of the 27 good rows
        if taken.step == 8:
            shutil.copytree(tmp_path / "run", tmp_path / "again")
    assert run.skipped[0] == "train-1.parquet, row 3 (no image)"
    assert run.feed.loading.begun == (2, 12)
    list(resume(tmp_path / "again", job))
    assert same(tmp_path / "again/model.safetensors", tmp_path / "run/model.safetensors")


def test_lines_are_checked_as_they_are_read():
    csvs(Path("d"))
    with Path("d/train.csv").open("a") as file:
        file.write(" ,pos\nfine,\n")
    rows = data.of(TEXTS).load().train
    with pytest.raises(DataError, match=r"1 bad row: train.csv, line 24 \(empty text\)"):
        list(rows.in_order())
    splits = data.of(replace(TEXTS, skip_bad=True)).load()
    assert len(list(splits.train.in_order())) == 18
    assert splits.skipped == ["train.csv, line 24 (empty text)", "train.csv, line 25 (no label)"]


def test_a_row_of_another_type_hides_no_other():
    for split in ("train", "test"):
        texts = [5, "a b", " ", "c d"] if split == "train" else ["a b", "c d"]
        rows = [json.dumps({"text": text, "label": "ab"[i % 2]}) for i, text in enumerate(texts)]
        Path("d").mkdir(exist_ok=True)
        Path("d", f"{split}.jsonl").write_text("\n".join(rows))
    splits = data.of(replace(TEXTS, skip_bad=True, text_column="text", label_column="label")).load()
    assert [row.values["text"] for row in splits.train.in_order()] == ["a b", "c d"]
    assert splits.skipped == [
        "train.jsonl, line 1 (text is no text)",
        "train.jsonl, line 3 (empty text)",
    ]


def test_an_image_outside_the_folder_is_never_left_out():
    photos(Path("d"))
    for split in ("train", "test"):
        rows = [f"{name}/0.jpg,{name}" for name in ("bus", "car")]
        table(Path("d", f"{split}.csv"), [*rows, "../secret.jpg,bus"], "image,label")
    stored = data.of(replace(PICTURES, skip_bad=True)).load().train
    with pytest.raises(DataError, match=r"line 4 .outside the folder of its table.; name images"):
        list(stored.in_order())


def test_white_is_told_by_a_whole_set_alone():
    rows = [f"{i}.tif,{'ab'[i % 2]}" for i in range(4)]
    for i in range(4):
        floats(Path("d", f"{i}.tif"), [0, i])
    for split in ("train", "val"):
        table(Path("d", f"{split}.csv"), rows, "image,label")
    stream = data.of(Job("any", "d", streaming=True)).load().train
    with pytest.raises(DataError, match=r"line 2 \(of mode F, whose white .* leave --stre"):
        list(stream.in_order())


def few(folder: Path) -> None:
    for split in ("train", "test"):
        texts(folder / f"{split}.csv", 3)


def one_split(folder: Path) -> None:
    texts(folder / "train.csv", 18)


REFUSED = {
    "a folder of images": (photos, {"model": "vit-micro"}, "d is a folder of images, which are re"),
    "no validation": (
        one_split,
        {},
        "d has no validation or test split, and of streamed rows none",
    ),
    "rows held out": (csvs, {"validation": 0.1}, "no rows of d are held out, since it is streamed"),
    "few rows": (few, {}, "batch size 4 is larger than the 3 training examples of d"),
    "a built-in set": (csvs, {"model": "vit-micro", "dataset": "digits"}, "digits is read as a wh"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_streamed_is_refused(case):
    make, settings, message = REFUSED[case]
    make(Path("d"))
    with pytest.raises(UsageError, match=message):
        data.check(replace(TEXTS, **settings))


def test_an_unknown_number_of_rows_needs_steps():
    assert TEXTS.resolved({"epochs": 3.0}, None).steps == 7
    for job in (replace(TEXTS, steps=None), replace(TEXTS, steps=None, epochs=1.0)):
        with pytest.raises(UsageError, match="rows of d is not known before they are streamed; gi"):
            job.resolved({"epochs": 3.0}, None)


def test_an_epoch_without_a_batch_ends():
    csvs(Path("d"))
    rows = replace(data.of(TEXTS).load().train, count=None).with_transform(lambda rows: rows)
    loads = Loading(rows, replace(TEXTS, batch_size=19, augment="none"), torch.device("cpu"))
    assert loads.steps_per_epoch is None
    with pytest.raises(DataError, match="fewer than a batch"):
        next(loads.batches())


def test_the_buffer_bounds_what_is_held(monkeypatch):
    """A row is read once its half of the buffer is, never long before it is used."""
    csvs(Path("d"))
    monkeypatch.setitem(stream.BUFFER, "text", 4)
    rows = data.of(TEXTS).load().train
    positions = [line.values["text"] for line in rows.in_order()]
    found = [positions.index(row.values["text"]) for row in rows.shuffled(0, 0)]
    assert sorted(found) == list(range(18))
    assert found != sorted(found)
    assert all(row <= place + 4 for place, row in enumerate(found))


def test_a_run_of_unknown_length_says_so(tmp_path, hub, monkeypatch):
    local_hub.cache_model(hub, "bert-base")
    csvs(Path("d"))
    source = data.of(TEXTS)
    splits = source.load()
    unknown = replace(splits, train=replace(splits.train, count=None))
    monkeypatch.setattr(
        data.own, "find", lambda job: replace(source, train_examples=None, load=lambda _: unknown)
    )
    run = begin(tmp_path / "run", replace(TEXTS, steps=5))
    assert [step.epoch for step in run] == [None] * 5  # over the end of the first epoch
    assert json.loads((tmp_path / "run/result.json").read_text())["epoch_seconds"] is None


def test_processes_that_load_ahead_change_nothing(monkeypatch):
    pictures(Path("d"))
    expected = order(PICTURES)
    ahead = {"num_workers": 2, "persistent_workers": True}
    monkeypatch.setattr(loading, "workers", lambda *_, **__: ahead)
    assert order(PICTURES) == expected
