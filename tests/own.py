"""Small data sets of one's own, for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

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


def table(file: Path, rows: Sequence[str], header: str = "text,label") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([header, *rows]) + "\n", "utf-8")
    return file


def texts(file: Path, count: int = 12, labels: Sequence[str] = ("pos", "neg")) -> Path:
    """A table of `count` texts, each with a comma, a quote or a line break in it."""
    odd = ('"good, says {}"', '"it ""was"" {}"', '"two lines\nof {}"', "plain text {}")
    rows = [f"{odd[i % 4].format(i)},{labels[i % len(labels)]}" for i in range(count)]
    return table(file, rows)
