"""Notes on rows that can be used, but may not be meant."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from razorctl import data
from razorctl.config.job import Job
from tests.own import CLASSES, photos, picture, table

FILMS = [f"a film of {i} hours,{'good' if i % 2 else 'bad'}" for i in range(8)]


def images(*more: str) -> str:
    """Images of which no two are alike but those at two paths more."""
    photos(Path("photos/train"))
    for number, name in enumerate(CLASSES):
        picture(Path("photos/val", name, "0.jpg"), 60 * number + 33)
    for file in more:
        picture(Path("photos", file), 201)
    return "photos"


def tables(**rows: Sequence[str]) -> str:
    for split, of in rows.items():
        table(Path("tables", f"{split}.csv"), of)
    return "tables"


# Name -> what writes the data and names them, and the notes.
NOTES = {
    "none": (lambda: str(table(Path("a.csv"), FILMS)), []),
    "an image of both splits": (
        lambda: images("train/car/x.png", "val/car/y.png"),
        [r"1 row for validation is in the training split too, such as val/car/y.png\."],
    ),
    "an image of two classes": (
        lambda: images("train/car/x.png", "train/bus/y.png"),
        [r"the same image has two labels: train/bus/y.png \(bus\) and train/car/x.png \(car\)\."],
    ),
    "texts of both splits": (
        lambda: tables(train=FILMS, test=[*FILMS[2:4], "another film,bad"]),
        [r"2 rows for test are in the training split too, such as test.csv, line 2\."],
    ),
    "texts of two labels": (
        lambda: str(table(Path("a.csv"), [*FILMS, *(f.replace("bad", "good") for f in FILMS[:3])])),
        [
            r"(1 row for validation is|2 rows for validation are) in the training split too",
            r"the same text has two labels: a.csv, line \d+ \(bad\) and a.csv, line \d+ "
            r"\(good\), and 1 more\.",
        ],
    ),
    "classes of other case": (
        lambda: str(table(Path("a.csv"), [*FILMS, "one film,Good", "two films,Good"])),
        [r"the classes 'Good' and 'good' differ only in case, space or form\."],
    ),
    "classes of other space": (
        lambda: str(table(Path("a.csv"), [*FILMS, "one film,go od", "two films,b ad"])),
        [r"the classes .* differ only in case, space or form, and 1 more\."],
    ),
    **{
        f"classes of other form: {other!a}": (
            lambda one=one, other=other: str(
                table(Path("a.csv"), [f"{i} films,{(one, other)[i % 2]}" for i in range(12)])
            ),
            [r"the classes .* differ only in case, space or form\."],
        )
        for one, other in (
            *(("a", "\ufeffa"), ("a", "a\u200b"), ("1", "\uff11"), ("1", "01")),
            *(("a-b", "a\u2010b"), ("a", "'a'")),
        )
    },
    "classes between signs": (
        lambda: str(table(Path("a.csv"), [*FILMS, *(f"{i} is,good|so so" for i in "ab")])),
        [r"the class 'good\|so so' may be several labels of a row"],
    ),
    "no header": (
        lambda: str(table(Path("a.csv"), FILMS[1:], FILMS[0])),
        [r"the first line of a.csv looks like a row, not like a header: 'bad' is a label of other"],
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_notes(case):
    write, expected = NOTES[case]
    name = write()
    share = {"photos": None, "tables": 0.0}.get(name, 0.3)
    notes = data.source_of(Job("any", name, validation=share)).load().notes
    assert len(notes) == len(expected), notes
    assert all(map(re.match, expected, notes)), notes
