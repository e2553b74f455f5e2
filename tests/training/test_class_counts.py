"""Class weights from the rows and pixels of each class, and the note on classes of few rows."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from razorctl.config.job import Job
from razorctl.errors import DataError
from razorctl.training.class_counts import class_counts, class_weights, rare_classes

CLASSES = ("car", "bus", "tram")


def job(class_weights: str | None = None, task: str | None = None) -> Job:
    return Job("m", "rows.csv", class_weights=class_weights, task=task)


def counts(*labels: int) -> np.ndarray:
    found = class_counts(Dataset.from_dict({"label": labels}), 3, job(), lambda _: None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "ratios"), [("balanced", [1 / 4, 1 / 2, 1]), ("2,1,0.5", [4.0, 2.0, 1.0])]
)
def test_weights_have_the_ratios_that_are_given_and_a_mean_of_1(given, ratios):
    rows = counts(0, 0, 0, 0, 1, 1, 2)
    weights = class_weights(rows, CLASSES, job(given))
    assert weights is not None
    torch.testing.assert_close(weights / weights[2], torch.tensor(ratios))
    assert (weights * torch.from_numpy(rows)).sum() == pytest.approx(7)
    assert class_weights(rows, CLASSES, job()) is None


def test_pixels_of_masks_are_counted():
    masks = [np.uint8([[1, 1, 3], [0, 255, 2]]), np.uint8([[1, 3, 3]])]  # 0 and 255 do not count
    rows = Dataset.from_dict(
        {"mask": [Image.fromarray(m) for m in masks], "mask_classes": ["1-3"] * 2}
    )
    of_pixels = job("balanced", "segmentation")
    assert [*class_counts(rows, 3, of_pixels, lambda _: None)] == [3, 1, 3]
    assert class_counts(rows, 3, job(None, "segmentation"), lambda _: None) is None


def test_a_class_without_rows_cannot_be_balanced():
    rows = counts(0, 0, 2)
    with pytest.raises(DataError, match=r"rows.csv has no label of bus, so classes cannot be bal"):
        class_weights(rows, CLASSES, job("balanced"))
    assert class_weights(rows, CLASSES, job("1,9,1")) is not None


def test_a_note_names_the_classes_of_few_rows():
    rows = counts(*[0] * 10, *[1] * 9, 2)
    (note,) = rare_classes(rows, CLASSES, job())
    assert note == (
        "2 of 3 classes have fewer than 10 training rows: bus (9 rows), tram (1 row); "
        "--class-weights balanced counts all classes alike, as --metric f1 does."
    )
    assert rare_classes(rows, CLASSES, job("balanced"))[0].endswith("tram (1 row).")
    assert rare_classes(counts(*[0] * 10, *[1] * 10, *[2] * 10), CLASSES, job()) == []
