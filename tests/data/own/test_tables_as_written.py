"""Tables as people write them: delimiters, quotes, other columns, numbers, spans, splits."""

import json
from pathlib import Path

import pytest

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own.read import lines
from razorctl.errors import DataError
from tests.own import photos, refused, refuses, sizes, table, written

PROSE = [f"a long text, number {i}" for i in range(12)]
MOODS = ["good", "bad", "so so"] * 4
# A table as it is written -> its rows.
DIALECTS = {
    "a.csv": ("text|label\na, b; c|x\n", [["a, b; c", "x"]]),
    "pipes.tsv": ("text|label\na, b; c|x\n", [["a, b; c", "x"]]),
    "b.csv": ("text\tlabel\na, b | c\tx\n", [["a, b | c", "x"]]),
    "commas.tsv": ('text,label\n"a, b",x\nit is "so",y\n', [["a, b", "x"], ['it is "so"', "y"]]),
    "c.csv": ("sep=;\r\ntext;label\r\na, b;x\r\n", [["a, b", "x"]]),
    "mark.csv": ("\ufeffsep=|\ntext|label\na, b|x\n", [["a, b", "x"]]),
    "quoted.csv": ('"sep=\t"\ntext\tlabel\na, b\tx\n', [["a, b", "x"]]),
    "spaces.csv": ('text, label\n"a, b", "x"\nc d, y\n', [["a, b", "x"], ["c d", "y"]]),
    "before quotes.csv": ('text;label\n"a; b"; "x"\n', [["a; b", "x"]]),
    "single.csv": ("text,label\n'a, b',x\n'it''s, so','y'\n", [["a, b", "x"], ["it's, so", "y"]]),
    "apostrophes.csv": ("text,label\n'a b',x\n'tis so,y\n", [["'a b'", "x"], ["'tis so", "y"]]),
    "letters.tsv": (
        'text\tlabel\n"Hello" he said\tx\n"open\ty\nend"\tx\n',
        [['"Hello" he said', "x"], ['"open', "y"], ['end"', "x"]],
    ),
    "last letters.tsv": ('label\ttext\nx\t"one\ny\ttwo"\n', [["x", '"one'], ["y", 'two"']]),
    "pairs.tsv": ('text\tlabel\n"say ""a"""\tx\n"b"\ty\n', [['say "a"', "x"], ["b", "y"]]),
    "lines.tsv": ('label\ttext\nx\t"one\ntwo"\ny\t"a"\n', [["x", "one\ntwo"], ["y", "a"]]),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects(name):
    written, rows = DIALECTS[name]
    Path(name).write_text(written, newline="")
    found = [line.values for line in lines.delimited(Path(name))]
    assert [[*row.values()] for row in found] == rows
    assert {*found[0]} == {"text", "label"}


# Columns beside a text -> the options that say what they are.
BESIDE = {
    "ids": {"id": [f"x{i}" for i in range(12)]},
    "prices": {"price": [f"{i} or so" for i in range(12)], "seen": [*range(12)]},
    "codes": {"icd": [f"A{i}" for i in range(12)]},
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("case", BESIDE)
def test_texts_beside_other_columns_are_no_fallback(case, kind):
    name = written({"text": PROSE, **BESIDE[case]}, kind)
    for model, language in (("bert-base", "masked-lm"), ("gpt2", "causal-lm")):
        said = refused(model, name)
        assert f"its other columns is clearly the label: {', '.join(BESIDE[case])}; name" in said
        assert "--label-column" in said
        assert f"--task {language}" in said
        source = data.source_of(Job(model, name, task=language))
        assert source.task == language
        assert source.details[0].endswith(f"; not used: {', '.join(BESIDE[case])}")
    source = data.source_of(Job("gpt2", name, text_column="text"))  # whose usual task that is
    assert source.task == "causal-lm"
    assert refused("bert-base", name, text_column="text").startswith(f"{name} has texts in text")


@pytest.mark.parametrize("count", [101, 150, 400])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_values_that_repeat_are_classes_however_many(count, kind):
    of = [f"intent {i % count}" for i in range(2 * count)]
    name = written({"text": [f"{i} a b" for i in range(2 * count)], "intent": of}, kind)
    source = data.source_of(Job("bert-base", name))
    assert (source.task, source.classes) == ("classification", count)


AGES = [20 + i % 45 for i in range(180)]
NUMBERS = {  # the label's column, its values -> classes in the note, None without one
    "age": (AGES, 45),
    "label": ([1, 2, 3, 4, 5] * 4, 5),
    "grade": ([0, 1, 2] * 4, 3),
    "target": ([f"{10 * (i % 4)}%" for i in range(16)], 4),
    "class": ([0, 1, 2] * 4, None),
    "labels": ([7, 9] * 6, None),
    "category": (MOODS, None),
}


@pytest.mark.parametrize("column", NUMBERS)
def test_whole_numbers_that_are_classes_are_noted(column):
    values, count = NUMBERS[column]
    name = written({"text": [f"{i} a b" for i in range(len(values))], column: values}, "csv")
    notes = data.source_of(Job("bert-base", name)).load().notes
    of_numbers = [note for note in notes if "--task regression" in note]
    said = f"whole numbers in {column} are learned as {count} classes; --task regression learns"
    assert of_numbers == ([f"{said} them as numbers."] if count else [])


# Numbers that are written with more than digits, and a point.
MARKED = ("{}.5%", "${}.25", "{},5", "€ {}.10", "1,{}00.50", "{}.5 EUR")


@pytest.mark.parametrize("form", MARKED)
def test_numbers_with_signs_are_named(form):
    written({"text": PROSE, "price": [form.format(i) for i in range(12)]}, "csv")
    said = refused("bert-base", "a.csv")
    assert f"line 2 (the price {form.format(0)!r} has a " in said
    assert "point" in said
    assert refused("bert-base", "a.csv", task="regression", label_column="price") == said


def test_dates_and_versions_are_no_numbers_with_signs():
    written({"text": PROSE, "day": [f"1-{i}" for i in range(12)], "v": ["1.2.3"] * 12}, "csv")
    assert "none of its other columns is clearly the label: day, v" in refused("bert-base", "a.csv")


SPANS = {
    "doccano": {"text": PROSE, "label": [[[0, 1, "X"]]] * 12},
    "doccano, sparse": {"text": PROSE, "label": [[]] * 11 + [[[0, 1, "X"]]]},
    "doccano, newer": {
        "text": PROSE,
        "entities": [[{"id": 1, "label": "X", "start_offset": 0, "end_offset": 1}]] * 12,
    },
    "Prodigy": {"text": PROSE, "spans": [[{"start": 0, "end": 1, "label": "X"}]] * 12},
    "Label Studio": {
        "data": [{"text": "a"}] * 12,
        "annotations": [[{"result": [{"value": {"start": 0, "end": 1}}]}]] * 12,
    },
    "with few values": {"text": PROSE, "mood": MOODS, "entities": [[{"start": 0, "end": 2}]] * 12},
    "with the label first": {"text": PROSE, "labels": [[["X", 0, 4]]] * 12},
    "as Python writes it": {"text": PROSE, "tags": ["[(0, 4, 'X')]"] * 12},
    "in columns": {"text": PROSE, "start": [0] * 12, "end": [4] * 12, "label": ["X", "Y"] * 6},
}


@pytest.mark.parametrize("case", SPANS)
def test_spans_are_refused(case):
    name = written(SPANS[case])
    for model in ("bert-base", "gpt2"):
        said = refused(model, name)
        assert "has entities by their first and last characters (spans), by its col" in said
        assert "lists of the tokens and the tags" in said
    if case == "doccano":
        assert "(spans)" in refused("bert-base", name, label_column="label")
        assert data.source_of(Job("bert-base", name, task="masked-lm")).task == "masked-lm"


def test_spans_in_other_files():
    rows = [[text, {"entities": [[0, 1, "X"]]}] for text in PROSE]
    Path("a.json").write_text(json.dumps(rows))
    assert "(spans), by its column entities" in refused("bert-base", "a.json")
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "(spans), by its column entities" in refused("gpt2", "a.jsonl")
    lists = [f'"{text}","[[0, 4, ""PER""]]"' for text in PROSE]
    table(Path("a.csv"), lists)
    assert "(spans), by its column label" in refused("bert-base", "a.csv")


TABLES_AS_TEXTS = {
    "a.txt": [f"ham\t{text}" for text in PROSE],
    "b.txt": [f"__label__x {text}" for text in PROSE],
    "c.txt": [json.dumps({"text": text}) for text in PROSE],
    "d.txt": ["text|label", *PROSE],
    "e.txt": [f"{text};ham" for text in PROSE],
    "f.csv": ["text:label", "a b:x", "c d:y", "e f:x"],
    "g.tsv": ["text^label", "a b^x", "c d^y", "e f^x"],
    "i.csv": ["text   label", *(f"{i}    x" for i in range(12))],
    "tags.txt": ["the/DT dog/NN", "a_DT cat_NN sees/VB"] * 3,
    "h.csv": ['"text,label"', *(f'"{text},x"' for text in PROSE)],
}


@pytest.mark.parametrize("name", TABLES_AS_TEXTS)
def test_lines_that_are_rows_are_no_texts(name):
    Path(name).write_text("\n".join(TABLES_AS_TEXTS[name]))
    said = refused("bert-base", name)
    assert said.startswith((f"{name} looks like a table, by ", f"{name} has one column, text"))
    assert "--task masked-lm" in said
    assert data.source_of(Job("bert-base", name, task="masked-lm")).task == "masked-lm"


@pytest.mark.parametrize("form", ["{},{}", "{}: {}", "{}:short {}", "{} {}"])
def test_lines_that_begin_with_few_words_are_no_texts(form):
    lines = [form.format("ham" if i % 2 else "spam", text) for i, text in enumerate(PROSE)]
    Path("a.txt").write_text("\n".join(lines))
    said = refused("bert-base", "a.txt")
    assert said.startswith("a.txt looks like a table, by a word such as ham")
    assert data.source_of(Job("gpt2", "a.txt")).task == "causal-lm"  # which is usual
    Path("a.txt").write_text("\n".join([*lines, "not one of these"]))
    assert data.source_of(Job("bert-base", "a.txt")).task == "masked-lm"


@pytest.mark.parametrize("above", ["# made by: a, b", "Report,", '"1,2",x', "one,two"])
def test_a_header_in_another_row(above):
    table(Path("a.csv"), ["text,label", *(f"a b {i},{'xy'[i % 2]}" for i in range(12))], above)
    assert "row 1 of a.csv looks like its header; delete" in refused("bert-base", "a.csv")


@pytest.mark.parametrize("tags", ["{0} I-PER", "{0} 1", "{0} NN"])
def test_tags_in_one_text(tags):
    labels = [tags.format(" ".join("O" * (i % 2 + 1))) for i in range(12)]
    columns = {"text": [" ".join(label.casefold().split()) for label in labels], "label": labels}
    written(columns, "csv")
    assert "a.csv has tags of words in label" in refused("bert-base", "a.csv")
    assert data.source_of(Job("bert-base", "a.csv", task="classification")).classes == 2


SPLITS = {
    "train, val, test": ("split", ["train"] * 6 + ["val"] * 3 + ["test"] * 3, [6, 3, 3]),
    "in turn": ("Subset", ["Train", "Test"] * 6, [5, 1, 6]),
    "other words": ("partition", ["train_set"] * 8 + ["dev_set"] * 4, [8, 4, None]),
    "more than splits": ("split", ["train"] * 6 + ["test", "", "odd"] * 2, [5, 1, 2]),
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("case", SPLITS)
def test_a_column_of_splits(case, kind):
    column, values, counts = SPLITS[case]
    name = written({"text": PROSE, "label": ["a", "b", "b", "a"] * 3, column: values}, kind)
    source = data.source_of(Job("bert-base", name))
    splits = source.load()
    assert sizes(splits) == counts
    more = ", without 4 rows of other splits" if "odd" in values else ""
    assert source.details[0].endswith(f"split in {column}{more}")
    if splits.test is not None:
        wanted = [text for text, of in zip(PROSE, values, strict=True) if of.casefold() == "test"]
        assert splits.test["text"][:] == wanted


def test_a_column_of_splits_of_images_and_one_that_is_named():
    photos(Path())
    rows = [f"{c}/{i}.jpg,{c},{'train' if i else 'test'}" for c in ("bus", "car") for i in range(4)]
    table(Path("a.csv"), rows, "image,label,split")
    splits = data.source_of(Job("vit-micro", "a.csv", validation=0.0)).load()
    assert (len(splits.train), len(splits.test)) == (6, 2)
    assert data.source_of(Job("vit-micro", "a.csv", label_column="split")).details[1] == (
        "2 classes: test, train"
    )
    assert "has no split dev, only" in refused("vit-micro", "a.csv", split="train,dev")


def test_paths_with_backslashes():
    photos(Path())
    rows = [f"{c}\\{i}.jpg,{c}" for c in ("bus", "car") for i in range(4)]
    table(Path("a.csv"), rows, "x,label")
    splits = data.source_of(Job("vit-micro", "a.csv")).load()
    assert len(splits.train) + len(splits.validation) == 8
    table(Path("b.csv"), [*rows, "..\\b.jpg,car"], "image,label")
    assert "outside the folder of its table" in refused("vit-micro", "b.csv")
    table(Path("c.csv"), [*rows, "car\\9.jpg,car"], "image,label")
    refuses(DataError, rf"c.csv, line 10: {Path.cwd()}/car.9.jpg \(missing\)", "vit-micro", "c.csv")
