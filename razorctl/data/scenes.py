"""Scenes of ADE20K with a class for each pixel, from the Hugging Face hub."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from razorctl.data.source import Source, Splits
from razorctl.errors import DataError
from razorctl.models import Progress
from razorctl.system import hub

if TYPE_CHECKING:
    from datasets import Dataset

REPO = "zhoubolei/scene_parse_150"
BRANCH = "refs/convert/parquet"  # the main one has only a script
CLASSES = Path(__file__).parent / "scene_parse_150" / "classes.txt"
FILES = {"train": "scene_parsing/train/*.parquet", "test": "scene_parsing/validation/*.parquet"}
COLUMNS = {"image": "image", "annotation": "mask"}


def load(name: str, _: Progress | None = None) -> Splits:
    """The splits for training and validation, which is the test split: that has no public masks.

    The value 0 stands for all other classes, as in the benchmark, and is ignored. Raises
    MissingError if the files cannot be found, and DataError if they cannot be read.
    """
    from datasets import load_dataset

    folder = hub.fetch(name, REPO, tuple(FILES.values()), "dataset", revision=BRANCH)
    files = {split: [*map(str, sorted(folder.glob(FILES[split])))] for split in FILES}
    with hub.reading(name, folder), hub.quiet_without_terminal():
        data = load_dataset("parquet", data_files=files)
    train, test = (_prepared(name, data[split]) for split in FILES)
    return Splits(train, None, test, tuple(CLASSES.read_text("utf-8").split("\n")[:-1]))


def _prepared(name: str, rows: "Dataset") -> "Dataset":
    from razorctl.data.own.decoding import as_images

    if absent := COLUMNS.keys() - {*rows.column_names}:
        raise DataError(
            f"{name} has no column {min(absent)}, only {', '.join(rows.column_names)}; it may "
            "have changed on the hub, so choose another data set."
        )
    rows = as_images(rows.select_columns(list(COLUMNS)).rename_columns(COLUMNS))
    return rows.add_column("mask_classes", ["1-150"] * len(rows))


DATASETS = (
    Source(
        "scene_parse_150",
        "22,210 photographs of scenes, 150 kinds of things and surfaces (ADE20K); from the hub",
        "image",
        classes=150,
        train_examples=20_210,
        test_examples=2_000,
        load=partial(load, "scene_parse_150"),
        task="segmentation",
        repository=REPO,
    ),
)
