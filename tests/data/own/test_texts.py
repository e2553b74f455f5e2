"""Texts and conversations of one's own, and which task data are for."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from razorctl import data, models
from razorctl.config.job import Job
from razorctl.data.own import store
from razorctl.errors import DataError, UsageError
from razorctl.models import ModelEntry
from tests.own import photos, refuses, table
from tests.own import texts as labeled

ALL = ("causal-lm", "masked-lm", "classification", "segmentation")
LM = {"task": "causal-lm"}
DOCUMENTS = [f"Title {i}\n\nfirst line of {i}\nsecond line" for i in range(10)]
WHOLE = "\n\n\n".join(DOCUMENTS)
TALK = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]


@pytest.fixture
def model(monkeypatch):
    """Registers a model for the tasks that are given, the most usual first."""

    def register(*tasks):
        entry = ModelEntry("some", "", "text", tasks, lambda task: None)
        monkeypatch.setitem(models.models(), "some", entry)

    return register


def load(dataset, **settings):
    settings = {"model": "any", "task": "causal-lm", "dataset": dataset, **settings}
    source = data.source_of(Job(**settings))
    splits = source.load()
    assert (source.classes, splits.classes) == (0, ())
    return source, splits


def documents(rows):
    return None if rows is None else list(rows["text"])


def text(file, content=WHOLE):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(content, "utf-8")


def chats(file, *conversations):
    """A file of good conversations and of these."""
    lines = [json.dumps({"messages": TALK}) for _ in range(10)]
    more = [json.dumps({"messages": conversation}) for conversation in conversations]
    Path(file).write_text("\n".join([*lines, *more]))


@pytest.mark.parametrize("small", [True, False], ids=["in memory", "in a file"])
@pytest.mark.parametrize("file", ["a.txt", "a.md", "train.text"])
def test_a_file_of_documents(file, small, monkeypatch):
    if not small:
        monkeypatch.setattr(store, "SMALL", 0)
    text(file, "\n\n\n\n" + WHOLE + "\n\n")
    source, splits = load(file, validation=0.3)
    assert (source.task, source.modality) == ("causal-lm", "text")
    assert (source.train_examples, source.test_examples) == (None, None)  # these are blocks
    assert source.details[1:] == ("for causal-lm", "7 rows to train on, 3 held out for validation")
    train, held_out = documents(splits.train), documents(splits.validation)
    assert sorted(train + held_out) == DOCUMENTS
    assert splits.train.column_names == ["text"]
    assert splits.record["rows"] == [DOCUMENTS.index(one) for one in held_out]
    assert bool(splits.train.cache_files) == (not small)


def test_line_breaks_of_windows_and_a_byte_order_mark():
    Path("a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n\r\nthree\r\n")
    _, splits = load("a.txt", validation=0.5)
    assert sorted(documents(splits.train) + documents(splits.validation)) == ["one\ntwo", "three"]


def test_names_that_are_not_utf8_are_read():
    for split in ("train", "test"):
        for name in (b"a.txt", b"n\xff.txt"):
            text(Path("d", split, os.fsdecode(name)), "some text")
    _, splits = load("d", validation=0.0)
    assert (len(splits.train), len(splits.test)) == (2, 2)


def test_the_end_of_a_single_document_is_held_out():
    lines = [f"line {i} of a long text" for i in range(100)]
    text("a.txt", "\n".join(lines))
    _, splits = load("a.txt", validation=0.2)
    assert documents(splits.train) == ["\n".join(lines[:80])]
    assert documents(splits.validation) == ["\n".join(lines[80:])]
    assert splits.record["rows"] == [1]
    text("b.txt", "all in one line")
    _, splits = load("b.txt", validation=0.2)
    assert (documents(splits.train), documents(splits.validation)) == (["all in one"], ["line"])
    text("c.txt", "word")
    with pytest.raises(DataError, match=r"c\.txt has one text without a line break"):
        load("c.txt")


def test_folders_of_texts():
    for i, one in enumerate(DOCUMENTS):
        text(f"flat/{i}.txt", one + "\n\n\n\nmore")
        text(f"parts/{'train' if i else 'test'}/{i}.md", one)
    for split in ("train", "valid", "test"):
        text(f"files/{split}.txt")
    _, splits = load("flat", validation=0.2)
    assert (len(splits.train), len(splits.validation)) == (8, 2)
    assert all(one.endswith("\n\n\n\nmore") for one in splits.train["text"])
    _, splits = load("parts", validation=0.0)
    assert (documents(splits.train), documents(splits.test)) == (DOCUMENTS[1:], DOCUMENTS[:1])
    _, splits = load("files")
    assert [*map(documents, (splits.train, splits.validation, splits.test))] == [DOCUMENTS] * 3
    _, splits = load("files", split="train,test")
    assert splits.test is None


WRITERS = {
    "csv": lambda rows: table(Path("a.csv"), rows, "text"),
    "jsonl": lambda rows: Path("a.jsonl").write_text(
        "\n".join(json.dumps({"text": row, "page": i}) for i, row in enumerate(rows))
    ),
    "parquet": lambda rows: Dataset.from_dict({"text": rows}).to_parquet("a.parquet"),
}


def test_messages_of_another_type():
    Dataset.from_dict({"messages": [["hello"], ["bye"]]}).to_parquet("a.parquet")
    with pytest.raises(DataError, match=r"messages has values of type list.*lists of role and con"):
        data.source_of(Job("any", "a.parquet", **LM))


BAD = {
    "no UTF-8": (lambda: Path("a.txt").write_bytes(b"one\nna\xefve"), "a.txt is not UTF-8 in line"),
    "an empty file": (lambda: Path("a.txt").touch(), "a.txt has no rows; add some"),
    "an empty file of several": (
        lambda: (text("d/a.txt"), text("d/b.txt", " \n")),
        r"1 bad row: b.txt \(empty text\)",
    ),
    "an empty text": (
        lambda: table(Path("a.csv"), ["a b", '""'], "text"),
        r"line 3 \(empty text\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_texts_are_named(case):
    write, message = BAD[case]
    write()
    refuses(DataError, message, "any", next(path.name for path in Path().iterdir()), **LM)


# What is there, the tasks of the model and the given one -> the task of the data.
CLEAR = {
    "labels": (labeled, ("classification", "masked-lm"), None, "classification"),
    "labels for a causal model": (labeled, ("causal-lm", "classification"), None, "classification"),
    "labels for a model without classes": (labeled, ("causal-lm",), None, "causal-lm"),
    "labels that are not asked for": (labeled, ALL, "causal-lm", "causal-lm"),
    "texts": (WRITERS["csv"], ("classification", "masked-lm"), None, "masked-lm"),
    "texts for a causal model": (WRITERS["csv"], ("causal-lm", "masked-lm"), None, "causal-lm"),
    "few values": (
        lambda rows: table(Path("a.csv"), [f"{row},x{i % 2}" for i, row in enumerate(rows)], "a,b"),
        *(("classification", "masked-lm"), None, "classification"),
    ),
    "few values for a causal model": (
        lambda rows: table(Path("a.csv"), [f"{row},x{i % 2}" for i, row in enumerate(rows)], "a,b"),
        *(("causal-lm", "classification"), "causal-lm", "causal-lm"),
    ),
    "a text beside others": (
        lambda rows: table(Path("a.csv"), [f"{row},{row}" for row in rows], "title,text"),
        *(("causal-lm",), None, "causal-lm"),
    ),
}


@pytest.mark.parametrize("case", CLEAR)
def test_the_task_of_a_table(case, model):
    write, tasks, given, expected = CLEAR[case]
    model(*tasks)
    rows = [f"a text {i}" for i in range(12)]
    write(Path("a.csv")) if write is labeled else write(rows)
    source = data.source_of(Job("some", "a.csv", task=given))
    assert source.task == expected
    names = {"text", "label"} if expected == "classification" else {"text"}
    assert {*source.load().train.column_names} == names


UNSERVED = {
    "a text without labels": (
        lambda: WRITERS["csv"](["a b", "c d"]),
        *("a.csv", "classification", "none of the columns of a.csv is clearly the label"),
    ),
    "a file of text": (lambda: text("a.txt"), "a.txt", "classification", "not a known kind of"),
    "images": (lambda: photos(Path("d")), "d", "causal-lm", "d has no single column or files of"),
    "a pair": (
        lambda: table(Path("a.csv"), ["a b,c d"] * 3, "premise,hypothesis"),
        *("a.csv", "masked-lm", "no single column or files of texts.* columns premise, hypothesis"),
    ),
    "conversations": (
        lambda: chats("a.jsonl"),
        *(
            "a.jsonl",
            "masked-lm",
            "a.jsonl has conversations, which are for causal-lm, not for masked-lm; leave --task",
        ),
    ),
    "texts for segments": (lambda: text("d/a.txt"), "d", "segmentation", "d has no images with m"),
    "a registered set": (lambda: None, "rte", "masked-lm", "rte is for classification; leave --ta"),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_a_task_that_data_do_not_serve(case):
    write, dataset, task, message = UNSERVED[case]
    write()
    refuses(UsageError, message, "any", dataset, task=task)


def test_a_label_column_of_texts_alone():
    labeled(Path("a.csv"))
    with pytest.raises(UsageError, match="causal-lm learns from texts alone; leave --label-column"):
        data.source_of(Job("any", "a.csv", label_column="label", **LM))
