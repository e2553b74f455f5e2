"""WikiText-2 (Merity et al., 2016) for language modelling, from the Hugging Face hub."""

from functools import partial
from typing import TYPE_CHECKING

from razorctl.data.hub import parquet_splits
from razorctl.data.source import Source, Splits
from razorctl.models import Progress

if TYPE_CHECKING:
    pass

REPO = "Salesforce/wikitext"
SPLITS = ("train", "validation", "test")


def load(name: str, _: Progress | None = None) -> Splits:
    """The splits, each as one text, whose lines are the rows of the files.

    Raises what `parquet_splits` raises.
    """
    from datasets import Dataset

    patterns = {split: [f"wikitext-2-raw-v1/{split}-*.parquet"] for split in SPLITS}
    with parquet_splits(name, REPO, patterns, {"text": "text"}) as splits:
        texts = ("".join(splits[split]["text"][:]) for split in SPLITS)
        train, validation, test = (Dataset.from_dict({"text": [text]}) for text in texts)
    return Splits(train, validation, test, ())


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
