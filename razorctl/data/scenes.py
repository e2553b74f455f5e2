"""Scenes of ADE20K with a class for each pixel, from the Hugging Face hub."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from razorctl.data.hub import parquet_splits
from razorctl.data.source import Source, Splits
from razorctl.models import Progress

if TYPE_CHECKING:
    pass

REPO = "zhoubolei/scene_parse_150"
BRANCH = "refs/convert/parquet"  # the main one has only a script
CLASSES = Path(__file__).parent / "scene_parse_150" / "classes.txt"
FILES = {"train": ["scene_parsing/train/*.parquet"], "test": ["scene_parsing/validation/*.parquet"]}
COLUMNS = {"image": "image", "annotation": "mask"}


def load(name: str, _: Progress | None = None) -> Splits:
    """The splits for training and, as the test split has no public masks, for validation.

    The value 0 stands for all other classes, as in the benchmark, and is ignored. Raises what
    `parquet_splits` raises.
    """
    with parquet_splits(name, REPO, FILES, COLUMNS, BRANCH) as splits:
        train, test = (
            rows.add_column("mask_classes", ["1-150"] * len(rows))
            for rows in (splits["train"], splits["test"])
        )
    return Splits(train, None, test, tuple(CLASSES.read_text("utf-8").split("\n")[:-1]))


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
