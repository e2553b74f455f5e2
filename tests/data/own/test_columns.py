"""The columns of a table that are used."""

from pathlib import Path

import pytest

from razorctl.data.own.raw import TEXT_COLUMNS
from razorctl.data.own.read.column import columns_of
from razorctl.data.own.read.recognition import classifier_columns
from razorctl.data.own.read.table import Table
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError
from tests.own import picture

PROSE, WORDS, FEW = (
    ["a long text", "another one", "some text", "a b"],
    ["w", "x", "y", "z"],
    [0, 1] * 2,
)
FILES = [f"{i}.png" for i in range(4)]
# Columns -> label, image and texts.
CLEAR = {
    "by name": ({"text": PROSE, "label": FEW}, ("label", None, ("text",))),
    "in any case": ({"Review": PROSE, " Category": FEW}, (" Category", None, ("Review",))),
    "by content": ({"says": PROSE, "id": WORDS, "mood": FEW}, ("mood", None, ("says",))),
    "words by name": ({"text": WORDS, "label": FEW}, ("label", None, ("text",))),
    "a pair": (
        {"sentence1": PROSE, "sentence2": PROSE, "label": FEW},
        ("label", None, ("sentence1", "sentence2")),
    ),
    "a pair of a known name": (
        {"question": PROSE, "sentence": PROSE, "label": FEW},
        ("label", None, ("question", "sentence")),
    ),
    "a name beside few values": (
        {"text": PROSE, "label": FEW, "fold": FEW},
        ("label", None, ("text",)),
    ),
    "labels in words": ({"text": PROSE, "target": PROSE}, ("target", None, ("text",))),
    "images by name": ({"file": ["no.jpg"] * 4, "label": FEW}, ("label", "file", ())),
    "images by files": ({"x": FILES, "label": FEW}, ("label", "x", ())),
    "images with remarks": ({"image": FILES, "note": PROSE, "label": FEW}, ("label", "image", ())),
}
UNCLEAR = {
    "two texts": ({"one": PROSE, "two": PROSE, "label": FEW}, "several columns .* text, one, two,"),
    "two named texts": ({"text": PROSE, "review": PROSE, "label": FEW}, "the text, text, review,"),
    "two labels": ({"text": PROSE, "label": FEW, "class": FEW}, "the label, label, class, of text"),
    "two of few values": ({"text": PROSE, "a": FEW, "b": FEW}, "the label, a, b, of text, a, b;"),
    "no label": ({"text": PROSE, "id": WORDS}, "clearly the label: text, id; name .* --label-colu"),
    "no text": ({"n": FEW, "label": FEW}, "an image or a text: n, label; .* or --text-column"),
    "two images": ({"file": FILES, "path": FILES, "label": FEW}, "image, file, path, .* --image-c"),
    "both": ({"file": FILES, "text": PROSE, "label": FEW}, "images in column file and text in tex"),
}


@pytest.fixture(autouse=True)
def files():
    for name in FILES:
        picture(Path(name))


def found(values, *, images=(), classes=(), **given):
    holds = dict.fromkeys(images, "images") | dict.fromkeys(classes, "classes")
    table = Table(DataRequest("a.csv", "m", **given), columns_of(values, holds, Path()))
    columns = classifier_columns(table)
    texts = tuple(columns.get(role) for role in TEXT_COLUMNS if columns.get(role))
    return columns.get("label"), columns.get("image"), texts


@pytest.mark.parametrize("case", CLEAR)
def test_what_is_clear_is_detected(case):
    values, expected = CLEAR[case]
    assert found(values) == expected


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_unclear_is_refused_with_the_columns_and_the_option(case):
    values, message = UNCLEAR[case]
    with pytest.raises(UsageError, match=message):
        found(values)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"text_column": "two"}, ("label", None, ("two",))),
        ({"text_column": "two, one"}, ("label", None, ("two", "one"))),
        ({"text_column": "a,b", "label_column": "two"}, ("two", None, ("a,b",))),
        ({"image_column": "one"}, ("label", "one", ())),
    ],
)
def test_what_is_given_is_used(given, expected):
    values = {"one": PROSE, "two": PROSE, "a,b": PROSE, "label": FEW}
    assert found(values, **given) == expected


def test_types_say_more_than_names():
    values = {"picture": [], "text": PROSE, "genre": FEW, "fold": FEW}
    with pytest.raises(UsageError, match="images in column picture and text in text"):
        found(values, images=["picture"], classes=["genre"])
    del values["text"]
    assert found(values, images=["picture"], classes=["genre"]) == ("genre", "picture", ())


def test_three_texts_are_too_many():
    with pytest.raises(UsageError, match="does not name one or two columns"):
        found({"text": PROSE, "b": PROSE, "c": PROSE, "label": FEW}, text_column="text,b,c")
