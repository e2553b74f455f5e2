"""Data sets on the Hugging Face hub, read from the Parquet files of their repositories."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from razorctl import units
from razorctl.config.tasks import Task
from razorctl.data.source import Source, Splits
from razorctl.errors import DataError
from razorctl.models import Modality, Progress
from razorctl.system import hub

if TYPE_CHECKING:
    from datasets import Dataset


def load(
    name: str,
    repo: str,
    train: tuple[str, ...],
    test: tuple[str, ...],
    columns: Mapping[str, str],
    classes: int,
    task: Task = "classification",
    _: Progress | None = None,
) -> Splits:
    """Reads the splits of a data set from Parquet files of its repository.

    Raises MissingError if the files cannot be found, and DataError if they cannot be read or do
    not have these columns and classes.

    Args:
        name: the name of the data set.
        repo: its repository.
        train: patterns of the files that are trained on.
        test: patterns of the files that are evaluated.
        columns: column in the files -> its name in `Splits`.
        classes: the number of classes.
        task: classification, or regression, whose labels are numbers.
    """
    # Imported here since it is slow to import and only reading needs it.
    from datasets import load_dataset

    folder = hub.fetch(name, repo, (*train, *test), "dataset")
    files = {
        split: [str(file) for pattern in patterns for file in sorted(folder.glob(pattern))]
        for split, patterns in (("train", train), ("test", test))
    }
    with hub.reading(name, folder):
        with hub.quiet_without_terminal():
            data = load_dataset("parquet", data_files=files)
        train_split, test_split = (
            _renamed(name, data[split], columns) for split in ("train", "test")
        )
        if task == "regression":
            return _measured(name, train_split, test_split, columns)
        return _numbered(name, train_split, test_split, classes)


def _renamed(name: str, split: "Dataset", columns: Mapping[str, str]) -> "Dataset":
    from razorctl.data.own.decoding import as_images

    absent = set(columns) - set(split.column_names)
    if absent:
        raise DataError(
            f"{name} has no column {', '.join(sorted(absent))}, only "
            f"{', '.join(split.column_names)}; it may have changed on the hub, so choose another "
            "data set."
        )
    return as_images(split.select_columns(list(columns)).rename_columns(columns))


def _numbered(name: str, train: "Dataset", test: "Dataset", classes: int) -> Splits:
    """The splits with labels numbered from 0; raises DataError if the classes do not match."""
    names = getattr(train.features["label"], "names", None)
    values = sorted({*train.unique("label"), *test.unique("label")})
    if names is None:
        names = [str(value) for value in values]
        numbers = {value: number for number, value in enumerate(values)}
        train, test = (
            split.remove_columns("label").add_column(
                "label", [numbers[v] for v in split["label"][:]]
            )
            for split in (train, test)
        )
    elif not set(values) <= set(range(len(names))):
        raise DataError(
            f"{name} has rows without a label; it may have changed on the hub, so choose another "
            "data set."
        )
    if len(names) != classes:
        raise DataError(
            f"{name} has {units.count(len(names), 'class')}, not {classes}; it may have changed on "
            "the hub, so choose another data set."
        )
    return Splits(train, None, test, tuple(names))


def _measured(name: str, train: "Dataset", test: "Dataset", columns: Mapping[str, str]) -> Splits:
    """The splits with numbers as labels; raises DataError for other labels."""
    import numpy as np

    for split in (train, test):
        labels = np.asarray(split["label"][:], np.float64)
        if not np.isfinite(labels).all():
            raise DataError(
                f"{name} has labels that are no numbers; it may have changed on the hub, so choose "
                "another data set."
            )
    number = next(column for column, own in columns.items() if own == "label")
    return Splits(train, None, test, (number,))


def from_hub(
    name: str,
    summary: str,
    modality: Modality,
    repo: str,
    columns: Mapping[str, str],
    *,
    classes: int,
    train_examples: int,
    test_examples: int,
    train: tuple[str, ...] = ("data/train-*.parquet",),
    test: tuple[str, ...] = ("data/test-*.parquet",),
    metric: str | None = None,
    task: Task = "classification",
) -> Source:
    """The `Source` of a data set on the hub; see `load` for the arguments."""
    read = partial(load, name, repo, train, test, columns, classes, task)
    return Source(
        name,
        f"{summary}; from the hub",
        modality,
        classes,
        train_examples,
        test_examples,
        read,
        metric=metric,
        task=task,
        repository=repo,
    )


def glue(
    name: str,
    summary: str,
    columns: tuple[str, ...],
    *,
    classes: int = 2,
    train_examples: int,
    test_examples: int,
    test: str = "validation",
    metric: str | None = None,
    task: Task = "classification",
) -> Source:
    """The `Source` of a task of GLUE.

    It is tested on a validation split: the labels of GLUE's test splits are not public.

    Args:
        name: the name of the task.
        summary: a line on it.
        columns: the columns of its text or of its two texts.
        classes: the number of classes.
        train_examples: the rows that are trained on.
        test_examples: the rows of the split `test`.
        test: the split that is evaluated.
        metric: as of `Source`.
        task: as of `load`.
    """
    return from_hub(
        name,
        f"{summary} (GLUE)",
        "text",
        "nyu-mll/glue",
        {**dict(zip(columns, ("text", "text_pair"), strict=False)), "label": "label"},
        classes=classes,
        train_examples=train_examples,
        test_examples=test_examples,
        train=(f"{name}/train-*.parquet",),
        test=(f"{name}/{test}-*.parquet",),
        metric=metric,
        task=task,
    )


DATASETS = (
    from_hub(
        "cifar10",
        "60,000 photographs of 10 kinds of things, 32 x 32 color",
        "image",
        "uoft-cs/cifar10",
        {"img": "image", "label": "label"},
        classes=10,
        train_examples=50_000,
        test_examples=10_000,
        train=("plain_text/train-*.parquet",),
        test=("plain_text/test-*.parquet",),
    ),
    from_hub(
        "cifar100",
        "60,000 photographs of 100 kinds of things, 32 x 32 color",
        "image",
        "uoft-cs/cifar100",
        {"img": "image", "fine_label": "label"},
        classes=100,
        train_examples=50_000,
        test_examples=10_000,
        train=("cifar100/train-*.parquet",),
        test=("cifar100/test-*.parquet",),
    ),
    from_hub(
        "flowers102",
        "8,189 photographs of 102 kinds of flowers",
        "image",
        # This copy has the authors' splits; transfer learning trains on train and validation.
        "dpdl-benchmark/oxford_flowers102",
        {"image": "image", "label": "label"},
        classes=102,
        train_examples=2_040,
        test_examples=6_149,
        train=("data/train-*.parquet", "data/validation-*.parquet"),
    ),
    from_hub(
        "cub200",
        "11,788 photographs of 200 kinds of birds",
        "image",
        "Donghyun99/CUB-200-2011",
        {"image": "image", "label": "label"},
        classes=200,
        train_examples=5_994,
        test_examples=5_794,
    ),
    glue(
        "rte",
        "2,767 pairs of texts: does the first entail the second?",
        ("sentence1", "sentence2"),
        train_examples=2_490,
        test_examples=277,
    ),
    glue(
        "cola",
        "9,594 sentences: is it grammatical?",
        ("sentence",),
        train_examples=8_551,
        test_examples=1_043,
        metric="matthews",
    ),
    glue(
        "sst2",
        "68,221 phrases of film reviews: positive or negative?",
        ("sentence",),
        train_examples=67_349,
        test_examples=872,
    ),
    glue(
        "mrpc",
        "4,076 pairs of sentences: do they mean the same?",
        ("sentence1", "sentence2"),
        train_examples=3_668,
        test_examples=408,
    ),
    glue(
        "stsb",
        "7,249 pairs of sentences: how alike are they, from 0 to 5?",
        ("sentence1", "sentence2"),
        classes=1,
        train_examples=5_749,
        test_examples=1_500,
        task="regression",
    ),
    glue(
        "qqp",
        "404,276 pairs of questions: do they ask the same?",
        ("question1", "question2"),
        train_examples=363_846,
        test_examples=40_430,
    ),
    glue(
        "mnli",
        "402,517 pairs of texts: entailment, neutral or contradiction?",
        ("premise", "hypothesis"),
        classes=3,
        train_examples=392_702,
        test_examples=9_815,
        test="validation_matched",
    ),
    glue(
        "qnli",
        "110,206 questions and sentences: is the answer in it?",
        ("question", "sentence"),
        train_examples=104_743,
        test_examples=5_463,
    ),
    glue(
        "wnli",
        "706 pairs of texts: does the first entail the second?",
        ("sentence1", "sentence2"),
        train_examples=635,
        test_examples=71,
    ),
)
