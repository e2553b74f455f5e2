"""Rows in memory as data sets of a user."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from razorctl.config.job import Job
from razorctl.data import own
from razorctl.data.own import in_memory
from razorctl.errors import ArgumentTypeError, DataError, UsageError
from tests.own import photos

LABELS = ("cat", "dog")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Rows with an image and a label each."""
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (9, 9, 3), np.uint8)) for _ in range(12)]
    return [{"image": image, "label": LABELS[n % 2]} for n, image in enumerate(images)]


def trained_on(data):
    """The pixels and the classes of the training rows that a job reads, in order."""
    splits = own.find(Job("vit-micro", str(in_memory.stored(data)))).load()
    pixels = [np.asarray(image.convert("RGB")).tolist() for image in splits.train["image"][:]]
    return pixels, [splits.classes[label] for label in splits.train["label"][:]]


KINDS = {
    "frame": pd.DataFrame,
    "categories": lambda rows: pd.DataFrame(rows).astype({"label": "category"}),
    "dataset": Dataset.from_list,
    "chosen": lambda rows: Dataset.from_list([*rows, rows[0]]).select(range(len(rows))),
    "tuple": tuple,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_rows_of_a_list(kind, rows):
    assert trained_on(KINDS[kind](rows)) == trained_on(rows)


def test_equal_rows_have_one_folder(rows):
    assert in_memory.stored(rows) == in_memory.stored(rows)
    assert in_memory.stored(rows) != in_memory.stored(rows[1:])


def test_splits_are_those_of_the_dict(rows):
    every = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:4]))
    source = own.find(Job("vit-micro", str(in_memory.stored(every))))
    assert source.test_examples == 4
    with pytest.raises(ArgumentTypeError, match=r"give one, such as data\['train'\]"):
        in_memory.lent(every).__enter__()


def test_missing_values_are_no_values(rows):
    frame = pd.DataFrame({"text": ["a", None, "b"], "score": [0.5, float("nan"), 1]})
    with in_memory.lent(frame) as file:
        table = Dataset.from_parquet(str(file))
    assert table[:] == {"text": ["a", None, "b"], "score": [0.5, None, 1.0]}


def test_paths_are_of_the_working_directory():
    photos(Path("d"), 6)
    files = sorted(Path("d").glob("*/*"))
    frame = pd.DataFrame({"file": map(str, files), "label": [f.parent.name for f in files]})
    plain = [{"file": file, "label": file.parent.name} for file in files]
    assert trained_on(frame) == trained_on(plain)
    Path("d/bus/0.jpg").unlink()
    with pytest.raises(DataError, match=r"d/bus/0.jpg of the table in memory cannot be read"):
        in_memory.stored(frame)


REFUSED = {
    "number": (3, ArgumentTypeError, "data cannot be of type int; give a path, a pandas DataFrame"),
    "numbers": ([3], ArgumentTypeError, "data cannot be of type list of int"),
    "some": ([{}, None], ArgumentTypeError, "of type list of NoneType and dict"),
    "stream": (
        Dataset.from_dict({"a": [1]}).to_iterable_dataset(),
        ArgumentTypeError,
        "data cannot be of type IterableDataset",
    ),
    "empty": ([], UsageError, "the data are an empty list"),
    "types": ([{"text": "a"}, {"text": 3}], DataError, "the data cannot be a table"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused(case):
    data, kind, sentence = REFUSED[case]
    with pytest.raises(kind) as error:
        in_memory.stored(data)
    assert sentence in str(error.value)
    assert isinstance(error.value, TypeError) == (kind is ArgumentTypeError)
