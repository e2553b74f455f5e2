"""Small data sets of one's own, for tests."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.source import Splits
from razorctl.errors import DataError, UsageError

CLASSES = ("bus", "car", "tram")


def picture(
    file: Path, shade: int = 90, size: tuple[int, int] = (12, 9), mode: str = "RGB"
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 2 * shade % 256, 50)).convert(mode).save(file)
    return file


def floats(file: Path, values: Sequence[float]) -> Path:
    """An image of one row of floating-point pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array([values], np.float32)).save(file)
    return file


def photos(folder: Path, count: int = 4, classes: Sequence[str] = CLASSES) -> Path:
    """A folder of `count` JPEGs for each class; no two are alike."""
    for number, name in enumerate(classes):
        for i in range(count):
            picture(folder / name / f"{i}.jpg", 60 * number + 5 * i)
    return folder


def masked(
    top: str, images: str = "images", of_masks: str = "masks", split: str = "", count: int = 8
) -> None:
    """Images and masks of the classes 0, 1 and 2."""
    mask = Image.fromarray(np.tile(np.array([0, 1, 2], np.uint8), (9, 4)))
    for i in range(count):
        picture(Path(top, split, images, f"{i}.jpg"), 9 * i)
        file = Path(top, split, of_masks, f"{i}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        mask.save(file)


def boxed(count: int, of: int = 3) -> dict[str, Any]:
    """A COCO document of images of 60 x 40 pixels with 0 to 2 boxes each, of `of` classes."""
    images, annotations = [], []
    for i in range(count):
        images.append({"id": i, "file_name": f"{i}.jpg", "width": 60, "height": 40})
        for box in range(i % 3):
            mark = {"id": len(annotations) + 1, "image_id": i, "category_id": 1 + (i + box) % of}
            annotations.append({**mark, "bbox": [2 + box, 3, 20 + i % 9, 10], "iscrowd": 0})
    categories = [{"id": 1 + i, "name": name} for i, name in enumerate(CLASSES[:of])]
    return {"images": images, "annotations": annotations, "categories": categories}


def coco(
    top: str,
    json_file: str = "annotations/all.json",
    images: str = "images",
    document: dict[str, Any] | None = None,
    count: int = 12,
) -> dict[str, Any]:
    """A folder with the images of a COCO document, of `boxed` by default, which it returns."""
    document = document or boxed(count)
    for number, entry in enumerate(document["images"]):
        picture(Path(top, images, entry["file_name"].replace("\\", "/")), 9 * number, (60, 40))
    Path(top, json_file).parent.mkdir(parents=True, exist_ok=True)
    Path(top, json_file).write_text(json.dumps(document))
    return document


def table(file: Path, rows: Sequence[str], header: str = "text,label") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([header, *rows]) + "\n", "utf-8")
    return file


def texts(file: Path, count: int = 12, labels: Sequence[str] = ("pos", "neg")) -> Path:
    """A table of `count` texts, each with a comma, a quote or a line break in it."""
    odd = ('"good, says {}"', '"it ""was"" {}"', '"two lines\nof {}"', "plain text {}")
    rows = [f"{odd[i % 4].format(i)},{labels[i % len(labels)]}" for i in range(count)]
    return table(file, rows)


def written(columns: Mapping[str, Sequence[Any]], kind: str = "jsonl", name: str = "a") -> str:
    """The name of a table of this kind with these columns; lists in CSV are as pandas writes."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    file = Path(f"{name}.{kind}")
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "csv":
        lines = [",".join(map(_cell, row.values())) for row in rows]
        table(file, lines, ",".join(columns))
    else:
        Dataset.from_list(rows).to_parquet(file)
    return str(file)


def _cell(value: Any) -> str:
    return f'"{value}"' if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


def sizes(splits: Splits) -> list[int | None]:
    """The rows to train on, to validate and to test."""
    parts = splits.train, splits.validation, splits.test
    return [None if part is None else len(part) for part in parts]


def refused(model: str, dataset: str, **settings: Any) -> str:
    """The sentence by which a data set is refused."""
    with pytest.raises((UsageError, DataError)) as error:
        data.source_of(Job(model, dataset, **settings))
    return str(error.value)


def refuses(error: type[Exception], said: str, *job: Any, **settings: Any) -> None:
    """Asserts that the data of a job are refused, or not loaded, with a pattern in the error."""
    with pytest.raises(error, match=said):
        data.source_of(Job(*job, **settings)).load()
