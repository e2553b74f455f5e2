"""The columns of a table that are used."""

from pathlib import Path

import pytest

from razorctl.data.own.raw import TEXT_COLUMNS
from razorctl.data.own.read.column import columns_of
from razorctl.data.own.read.recognition import (
    classifier_columns,
    table_columns,
    unlabeled_columns,
)
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


CHAT = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 4
# Model, columns and what they are read as -> the columns by role.
ALIASES = {
    "texts and labels": (
        ("bert-base", "text=says,label=mood"),
        {"says": PROSE, "text": PROSE, "mood": FEW, "label": WORDS},
        {"text": "says", "label": "mood"},
    ),
    "a triplet": (
        ("bert-base", " anchor = q, positive=a=b ,negative=n"),
        {"q": PROSE, "a=b": PROSE, "n": PROSE, "other": PROSE},
        {"text": "q", "text_pair": "a=b", "negative.0": "n"},
    ),
    "chats": (("gpt2", "messages=talk"), {"talk": CHAT, "text": PROSE}, {"messages": "talk"}),
    "prompts": (
        ("gpt2", "instruction=ask,output=say"),
        {"ask": PROSE, "say": PROSE, "output": PROSE},
        {"prompt": "ask", "answer": "say"},
    ),
    "images": (
        ("vit-micro", "image=b,label=mood"),
        {"a": FILES, "b": FILES, "mood": FEW, "kind": FEW},
        {"image": "b", "label": "mood"},
    ),
    "masks": (
        ("segformer-b0", "mask=b"),
        {"image": FILES, "b": FILES, "mask": FEW},
        {"image": "image", "mask": "b"},
    ),
}


@pytest.mark.parametrize("case", ALIASES)
def test_columns_are_read_as_what_they_are_said_to_be(case):
    (model, column), values, expected = ALIASES[case]
    request = DataRequest("a.csv", model, column=column)
    assert dict(table_columns(request, columns_of(values, {}, Path())).roles) == expected


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("text=none", "a.csv has no column none, only says, mood, id; .* with --column."),
        ("text=says,mode=id", "for classification no column is read as mode, so id of a.csv"),
    ],
)
def test_names_that_nothing_reads_are_refused(column, message):
    request = DataRequest("a.csv", "bert-base", column=column)
    with pytest.raises(UsageError, match=message):
        table_columns(request, columns_of({"says": PROSE, "mood": FEW, "id": WORDS}, {}, Path()))


def test_new_rows_have_the_names_of_the_run_where_they_have_its_columns():
    run = DataRequest("a.csv", "bert-base", column="text=says,label=mood")
    request = DataRequest("b.csv", "bert-base", "classification", trained=run)
    for values in {"says": PROSE, "text": PROSE}, {"text": PROSE, "note": PROSE}:
        columns = unlabeled_columns(request, columns_of(values, {}, Path()), "text")
        assert columns.get("text") == next(iter(values))
