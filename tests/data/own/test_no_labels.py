"""Labels that are none, labels that are one class in several spellings, and rows that are bad."""

import json
from pathlib import Path

import pytest

from razorctl import data
from razorctl.config.job import Job
from razorctl.data import own
from razorctl.data.own import whole
from razorctl.errors import DataError
from tests.own import photos, picture, table, written

TEXTS = [f"a text of {i} words" for i in range(12)]


def loaded(name, **settings):
    return data.source_of(Job("bert-base", name, **settings)).load()


# What stands for no label, the labels beside it, and the classes.
NONE = {
    "torch's": (-100, [0, 1, 2], ("0", "1", "2")),
    "that of contests": (-1, [0, 1, 2], ("0", "1", "2")),
    "-1 of names": ("-1", ["good", "bad"], ("bad", "good")),
    "a dash": ("-", ["good", "bad"], ("bad", "good")),
    "pandas'": ("nan", ["good", "bad"], ("bad", "good")),
    "R's": ("NA", ["1", "2"], ("1", "2")),
    "Python's": ("None", ["good", "bad"], ("bad", "good")),
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("case", NONE)
def test_what_is_no_label_is_no_class(case, kind):
    none, labels, classes = NONE[case]
    name = written({"text": TEXTS, "label": [none, none, *(labels * 5)[:10]]}, kind)
    with pytest.raises(DataError, match=rf"2 bad rows: .* \(no label: {none}\); .* leaves 10 rows"):
        loaded(name)
    splits = loaded(name, skip_bad=True)
    assert splits.classes == classes
    assert len(splits.train) + len(splits.validation) == 10
    assert f"missing labels, 2 of {none}, are ignored" in " ".join(splits.notes)


# Labels with -1, and whether it is a class.
SIGNED = {
    "opinions": ([-1, 0, 1], ("-1", "0", "1")),
    "two sides": (["-1", "1"], ("-1", "1")),
    "grades": ([-2, -1, 0, 1, 2], ("-2", "-1", "0", "1", "2")),
    "numbers from 0 on": ([-1, 0, 1, 2], ("0", "1", "2")),
}


@pytest.mark.parametrize("case", SIGNED)
def test_one_below_zero(case):
    labels, classes = SIGNED[case]
    splits = loaded(written({"text": TEXTS, "label": (labels * 6)[:12]}, "jsonl"), skip_bad=True)
    assert splits.classes == classes
    said = [note for note in splits.notes if "-1" in note]
    assert len(said) == (case != "grades")


@pytest.mark.parametrize("label", ["?", "na", "none", "unknown", "#VALUE!", "---", "NAN"])
def test_what_may_be_no_label_is_noted(label):
    splits = loaded(written({"text": TEXTS, "label": [label, "good", "bad"] * 4}, "csv"))
    assert label in splits.classes
    (note,) = splits.notes
    assert note == f"the label {label} is learned as a class; leave it empty where it means none."


def test_what_is_a_class_of_a_run_is_no_missing_label():
    name = written({"text": TEXTS, "label": ["None", "good"] * 6}, "csv")
    rows, _, _ = whole.labeled(Job("bert-base", name), "text", ["None", "bad", "good"])
    assert rows["label"][:] == [0, 2] * 6
    splits = own.find(Job("bert-base", name), classes=["None", "good"]).load()  # of an older run
    assert splits.classes == ("None", "good")
    assert len(splits.train) + len(splits.validation) == 12


def test_nan_in_json_is_no_label():
    labels = [[float("nan"), 1, 2.0][i % 3] for i in range(12)]
    splits = loaded(written({"text": TEXTS, "label": labels}, "jsonl"), skip_bad=True)
    assert splits.classes == ("1", "2")
    assert [line.partition(" (")[2] for line in splits.skipped] == ["no label)"] * 4


# The tags of a row of three tokens: as a file has them, and as they are learned.
TAGS = {
    "torch's": ("jsonl", [-100, 0, 1], [-100, 0, 1]),
    "torch's in Parquet": ("parquet", [0, -100, 3], [0, -100, 1]),
    "null": ("jsonl", ["O", None, "B-LOC"], [0, -100, 1]),
    "NaN": ("jsonl", ["O", float("nan"), "B-LOC"], [0, -100, 1]),
    "an empty text": ("jsonl", ["", "O", "B-LOC"], [-100, 0, 1]),
    "a dash": ("jsonl", ["O", "B-LOC", "-"], [0, 1, -100]),
    "-1": ("jsonl", [0, -1, 1], [0, -100, 1]),
}


@pytest.mark.parametrize("case", TAGS)
def test_tags_that_are_none(case):
    kind, tags, labels = TAGS[case]
    tokens = [["in", "rome", f"{i}"] for i in range(12)]
    tags = [tags] * 11 + [[tag for tag in tags if tag in (0, "O")] * 3]
    name = written({"tokens": tokens, "ner_tags": tags}, kind)
    splits = loaded(name)
    rows = [row["label"] for part in splits.parts.values() for row in part]
    assert len(splits.classes) == 2
    assert sorted(rows) == sorted([*[labels] * 11, [0] * 3])
    assert any(note.startswith("missing labels, 11 of ") for note in splits.notes)
    job = Job("bert-base", name, task="token-classification")
    swapped, _, _ = whole.labeled(job, "text", splits.classes[::-1])
    assert swapped["label"][0] == [n if n < 0 else 1 - n for n in labels]


# Labels, and the classes that they are.
SPELLED = {
    "numbers": (["1", "1.0", "2", "2.0"], ("1", "2"), "'1' and '1.0' are one class, 1."),
    "truth": (["True", "false", "true", "False"], ("false", "true"), "'True' and 'true' are one"),
    "forms of Unicode": (["café", "cafe\u0301", "bar"], ("bar", "café"), r"'cafe\u0301' and"),
    "one spelling": (["1.0", "2.0"], ("1.0", "2.0"), ""),
}


@pytest.mark.parametrize("case", SPELLED)
def test_spellings_of_one_class(case):
    labels, classes, said = SPELLED[case]
    splits = loaded(written({"text": TEXTS, "label": (labels * 6)[:12]}, "csv"))
    assert splits.classes == classes
    assert said in " ".join(splits.notes)
    assert bool(splits.notes) == bool(said)


def test_spellings_in_lists_folders_and_runs():
    lists = [["é", "1"], ["e\u0301", "1.0"]] * 6
    assert loaded(written({"text": TEXTS, "labels": lists}, "jsonl")).classes == ("1", "é")
    photos(Path("d/train"), classes=("café", "bus"))
    photos(Path("d/test"), classes=("cafe\u0301", "bus"))
    splits = data.source_of(Job("vit-micro", "d")).load()
    assert (splits.classes, sorted(splits.test["label"])) == (("bus", "café"), [0] * 4 + [1] * 4)
    rows, _, _ = whole.labeled(Job("vit-micro", "d"), "image", ["cafe\u0301", "bus"])
    assert sorted(rows["label"]) == [0] * 4 + [1] * 4


def test_bad_rows_make_no_classes():
    lines = [
        "a text, with a comma,good",
        ",odd",
        *(f"{text},{'ab'[i % 2]}" for i, text in enumerate(TEXTS)),
    ]
    splits = loaded(str(table(Path("a.csv"), lines)), skip_bad=True)
    assert (splits.classes, len(splits.skipped)) == (("a", "b"), 2)
    tokens = [["a", "b"]] * 12 + [["c"], []]
    tags = [["X", "Y"]] * 12 + [["Z", "X"], ["V"]]
    assert loaded(written({"tokens": tokens, "tags": tags}, "jsonl"), skip_bad=True).classes == (
        "X",
        "Y",
    )
    lists = [["x", "y"]] * 11 + [["z"]]
    name = written({"text": [*TEXTS[:11], " "], "labels": lists}, "jsonl")
    assert loaded(name, skip_bad=True).classes == ("x", "y")


def test_bad_images_make_no_classes():
    photos(Path("d"))
    picture(Path("d/van/0.jpg")).write_bytes(b"no image")
    source = data.source_of(Job("vit-micro", "d", skip_bad=True))
    assert (source.classes, source.train_examples) == (3, 11)
    splits = source.load()
    assert splits.classes == ("bus", "car", "tram")
    assert splits.record["skipped"] == {"d": [12]}


# The lines of a file all or the first of whose rows are bad, and what is said.
ALL_BAD = {
    "commas after objects": ("a.jsonl", '{"text": "a", "label": 1},\n' * 9, "(not JSON)"),
    "a list": ("a.jsonl", '[{"text": "a", "label": 1}]\n', "a.jsonl, line 1 (no object)"),
    "a field too many": ("a.csv", "text,label\n" + "a b,1,\n" * 9, "6 and 4 more (3 fields, not 2"),
    "a comment first": ("a.csv", "# made by a tool\n" + "a b,1\n" * 9, "(2 fields, not 1)"),
}


@pytest.mark.parametrize("case", ALL_BAD)
def test_why_all_rows_are_bad(case):
    name, text, said = ALL_BAD[case]
    Path(name).write_text(text)
    with pytest.raises(DataError) as error:
        loaded(name)
    assert said in str(error.value)
    assert f"{name}, line " in str(error.value)
    assert str(error.value).endswith("or leave them out with --skip-bad, which leaves 0 rows.")


def test_good_rows_after_many_bad_ones():
    good = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(TEXTS)]
    Path("a.jsonl").write_text("\n".join(["no row"] * 1100 + good))
    with pytest.raises(DataError, match=r"1,100 bad rows: .* and 1,095 more \(not JSON\)"):
        loaded("a.jsonl")
    splits = loaded("a.jsonl", skip_bad=True)
    assert len(splits.train) + len(splits.validation) == 12


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_input_that_is_none(kind):
    rows = {"instruction": TEXTS, "input": ["nan", ""] * 6, "output": [f"so {t}" for t in TEXTS]}
    if kind == "jsonl":
        rows["input"] = [float("nan"), None] * 6
    splits = data.source_of(Job("gpt2", written(rows, kind))).load()
    asked = [row["messages"][0]["content"] for part in splits.parts.values() for row in part]
    assert sorted(asked) == sorted(TEXTS)
