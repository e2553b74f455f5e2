"""WikiText-2 (Merity et al., 2016) for language modelling, from the Hugging Face hub."""

from functools import partial
from typing import TYPE_CHECKING

from razorctl.data.source import Source, Splits
from razorctl.errors import DataError
from razorctl.models import Progress
from razorctl.system import hub

if TYPE_CHECKING:
    from datasets import Dataset

REPO = "Salesforce/wikitext"
SPLITS = ("train", "validation", "test")


def load(name: str, _: Progress | None = None) -> Splits:
    """The splits, each as one text, whose lines are the rows of the files.

    Raises MissingError if the files cannot be found, and DataError if they cannot be read.
    """
    from datasets import load_dataset

    patterns = {split: f"wikitext-2-raw-v1/{split}-*.parquet" for split in SPLITS}
    folder = hub.fetch(name, REPO, tuple(patterns.values()), "dataset")
    files = {split: [*map(str, sorted(folder.glob(patterns[split])))] for split in SPLITS}
    with hub.reading(name, folder), hub.quiet_without_terminal():
        data = load_dataset("parquet", data_files=files)
        train, validation, test = (_joined(name, data[split]) for split in SPLITS)
        return Splits(train, validation, test, ())


def _joined(name: str, rows: "Dataset") -> "Dataset":
    from datasets import Dataset

    if "text" not in rows.column_names:
        raise DataError(
            f"{name} has no column text, only {', '.join(rows.column_names)}; it may have changed "
            "on the hub, so choose another data set."
        )
    return Dataset.from_dict({"text": ["".join(rows["text"][:])]})


DATASETS = (
    Source(
        "wikitext2",
        "720 articles of Wikipedia, 2 million words (WikiText-2); from the hub",
        "text",
        classes=0,
        train_examples=None,
        test_examples=None,
        load=partial(load, "wikitext2"),
        task="causal-lm",
        repository=REPO,
    ),
)
