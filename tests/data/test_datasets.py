"""The contract of a data set, for every built-in one."""

import pytest

from razorctl.data import DATASETS, find
from razorctl.errors import UsageError


@pytest.mark.parametrize("name", DATASETS)
def test_rows_are_images_with_labels_in_range(name):
    splits = find(name).load()
    assert DATASETS[name].summary
    for split in (splits.train, splits.test):
        assert set(split.column_names) == {"image", "label"}
        assert set(split["label"]) == set(range(len(splits.classes)))


def test_digits():
    splits = find("digits").load()
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert splits.classes == tuple("0123456789")
    image = splits.train[0]["image"]
    assert image.size == (8, 8)
    assert image.mode == "L"
    assert image.getextrema() == (0, 255)
    # No image is in both splits.
    train, test = ({row["image"].tobytes() for row in s} for s in (splits.train, splits.test))
    assert not train & test


def test_unknown_data_set_gets_the_nearest():
    with pytest.raises(UsageError, match="unknown data set 'digit'; did you mean 'digits'"):
        find("digit")
