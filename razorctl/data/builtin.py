"""Data sets that ship with razorctl and need no network."""

from pathlib import Path
from typing import TYPE_CHECKING

from razorctl.data.source import Source, Splits
from razorctl.models import Progress

if TYPE_CHECKING:
    from datasets import Dataset

DIGITS = Path(__file__).parent / "digits"


def _read(file: Path) -> "Dataset":
    # Imported here since they are slow to import and only reading needs them.
    import pyarrow.parquet
    from datasets import Dataset

    from razorctl.data.own.decoding import as_images

    # Read without Dataset.from_parquet, which would write a copy to the user's cache.
    return as_images(Dataset(pyarrow.parquet.read_table(file)))


def digits(_: Progress | None = None) -> Splits:
    """1,797 handwritten digits of 8 x 8 gray pixels; every fifth is in the test split."""
    train, test = _read(DIGITS / "train.parquet"), _read(DIGITS / "test.parquet")
    return Splits(train, None, test, tuple(train.features["label"].names))


DATASETS = (
    Source(
        "digits",
        "1,797 handwritten digits (UCI), 8 x 8 gray; built in",
        "image",
        classes=10,
        train_examples=1437,
        test_examples=360,
        load=digits,
    ),
)
