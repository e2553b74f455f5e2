"""Data sets on the Hugging Face hub, read from the Parquet files of their repositories."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from razorctl import units
from razorctl.config.tasks import Task
from razorctl.data.source import Source, Splits
from razorctl.errors import DataError
from razorctl.models import Modality, Progress
from razorctl.system import hub

if TYPE_CHECKING:
    from datasets import Dataset

CHANGED = "it may have changed on the hub, so choose another data set"


@contextmanager
def parquet_splits(
    name: str,
    repo: str,
    patterns: Mapping[str, Sequence[str]],
    columns: Mapping[str, str],
    revision: str | None = None,
) -> Iterator[dict[str, "Dataset"]]:
    """Yields the splits of a repository; turns errors of reading them in the block into DataError.

    Raises MissingError if the files cannot be found, and DataError if they lack a column.

    patterns: split -> patterns of its files. columns: column in the files -> its name in `Splits`.
    """
    # Imported here since they are slow to import and only reading needs them.
    from datasets import load_dataset

    from razorctl.data.own.decoding import as_images

    every = tuple(pattern for part in patterns.values() for pattern in part)
    folder = hub.fetch(name, repo, every, "dataset", revision=revision)
    files = {
        split: [str(file) for pattern in part for file in sorted(folder.glob(pattern))]
        for split, part in patterns.items()
    }
    with hub.reading(name, folder), hub.quiet_without_terminal():
        splits = {}
        for split, rows in load_dataset("parquet", data_files=files).items():
            if absent := sorted(columns.keys() - {*rows.column_names}):
                only = ", ".join(rows.column_names)
                raise DataError(
                    f"{name} has no column {', '.join(absent)}, only {only}; {CHANGED}."
                )
            splits[split] = as_images(rows.select_columns(list(columns)).rename_columns(columns))
        yield splits


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
    """The splits of a data set for classification, or for regression, whose labels are numbers.

    Raises what `parquet_splits` raises, and DataError for other labels and numbers of classes.

    train, test: patterns of files. columns: as in `parquet_splits`. classes: their number.
    """
    with parquet_splits(name, repo, {"train": train, "test": test}, columns) as splits:
        if task == "regression":
            return _measured(name, splits["train"], splits["test"], columns)
        return _numbered(name, splits["train"], splits["test"], classes)


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
        raise DataError(f"{name} has rows without a label; {CHANGED}.")
    if len(names) != classes:
        raise DataError(f"{name} has {units.count(len(names), 'class')}, not {classes}; {CHANGED}.")
    return Splits(train, None, test, tuple(names))


def _measured(name: str, train: "Dataset", test: "Dataset", columns: Mapping[str, str]) -> Splits:
    """The splits with numbers as labels; raises DataError for other labels."""
    import numpy as np

    for split in (train, test):
        labels = np.asarray(split["label"][:], np.float64)
        if not np.isfinite(labels).all():
            raise DataError(f"{name} has labels that are not numbers; {CHANGED}.")
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


# Tasks of GLUE: name, rows for training and test, classes (1 is a regression), columns of texts,
# summary. They are tested on a validation split, since labels of test splits are not public.
GLUE = """
rte 2490 277 2 sentence1,sentence2 2,767 pairs of texts: does the first entail the second?
cola 8551 1043 2 sentence 9,594 sentences: is it grammatical?
sst2 67349 872 2 sentence 68,221 phrases of film reviews: positive or negative?
mrpc 3668 408 2 sentence1,sentence2 4,076 pairs of sentences: do they mean the same?
stsb 5749 1500 1 sentence1,sentence2 7,249 pairs of sentences: how alike are they, from 0 to 5?
qqp 363846 40430 2 question1,question2 404,276 pairs of questions: do they ask the same?
mnli 392702 9815 3 premise,hypothesis 402,517 pairs of texts: entailment, neutral or contradiction?
qnli 104743 5463 2 question,sentence 110,206 questions and sentences: is the answer in it?
wnli 635 71 2 sentence1,sentence2 706 pairs of texts: does the first entail the second?
"""


def _glue(row: str) -> Source:
    name, train, test, classes, columns, summary = row.split(maxsplit=5)
    split = "validation_matched" if name == "mnli" else "validation"
    texts = zip(columns.split(","), ("text", "text_pair"), strict=False)
    return from_hub(
        name,
        f"{summary} (GLUE)",
        "text",
        "nyu-mll/glue",
        {**dict(texts), "label": "label"},
        classes=int(classes),
        train_examples=int(train),
        test_examples=int(test),
        train=(f"{name}/train-*.parquet",),
        test=(f"{name}/{split}-*.parquet",),
        metric="matthews" if name == "cola" else None,
        task="regression" if classes == "1" else "classification",
    )


SCENES = "zhoubolei/scene_parse_150"
SCENES_BRANCH = "refs/convert/parquet"  # the main one has only a script
SCENE_CLASSES = Path(__file__).parent / "scene_parse_150" / "classes.txt"


def scenes(name: str, _: Progress | None = None) -> Splits:
    """The splits of ADE20K for training and for validation: its test split has no public masks.

    The value 0 stands for all other classes, as in the benchmark, and is ignored. Raises what
    `parquet_splits` raises.
    """
    columns = {"image": "image", "annotation": "mask"}
    folders = {"train": "train", "test": "validation"}
    files = {split: [f"scene_parsing/{part}/*.parquet"] for split, part in folders.items()}
    with parquet_splits(name, SCENES, files, columns, SCENES_BRANCH) as splits:
        train, test = (
            rows.add_column("mask_classes", ["1-150"] * len(rows))
            for rows in (splits["train"], splits["test"])
        )
    return Splits(train, None, test, tuple(SCENE_CLASSES.read_text("utf-8").split("\n")[:-1]))


WIKITEXT = "Salesforce/wikitext"


def wikitext(name: str, _: Progress | None = None) -> Splits:
    """The splits of WikiText-2 (Merity et al., 2016), each as one text of the lines in its files.

    Raises what `parquet_splits` raises.
    """
    from datasets import Dataset

    names = ("train", "validation", "test")
    files = {split: [f"wikitext-2-raw-v1/{split}-*.parquet"] for split in names}
    with parquet_splits(name, WIKITEXT, files, {"text": "text"}) as splits:
        texts = ("".join(splits[split]["text"][:]) for split in names)
        train, validation, test = (Dataset.from_dict({"text": [text]}) for text in texts)
    return Splits(train, validation, test, ())


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
    *map(_glue, GLUE.strip().split("\n")),
    Source(
        "scene_parse_150",
        "22,210 photographs of scenes, 150 kinds of things and surfaces (ADE20K); from the hub",
        "image",
        classes=150,
        train_examples=20_210,
        test_examples=2_000,
        load=partial(scenes, "scene_parse_150"),
        task="segmentation",
        repository=SCENES,
    ),
    Source(
        "wikitext2",
        "720 articles of Wikipedia, 2 million words (WikiText-2); from the hub",
        "text",
        classes=0,
        train_examples=None,
        test_examples=None,
        load=partial(wikitext, "wikitext2"),
        task="causal-lm",
        repository=WIKITEXT,
    ),
)
