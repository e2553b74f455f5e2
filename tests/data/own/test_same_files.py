"""Predicting takes the data that training takes, of each kind, by the same name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset

from razorctl import data
from razorctl.config.job import Job
from razorctl.data import own
from razorctl.data.own import whole
from razorctl.errors import UsageError
from tests.own import CLASSES, masked, photos, table, texts

PROSE = [f"a long text, number {i}" for i in range(8)]
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
SHARED = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]


def lines(file, rows):
    Path(file).write_text("\n\n".join(map(json.dumps, rows)) + "\n\n")


def splits(write):
    for split in ("train", "validation"):
        write(split)


def of_texts(suffix):
    rows = [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate(PROSE)]
    if suffix == "jsonl":
        lines("a.jsonl", rows)
    elif suffix == "parquet":
        Dataset.from_list(rows).to_parquet("a.parquet")
    else:
        comma = "," if suffix == "csv" else "\t"
        own = [f'"{row["text"]}"{comma}{row["label"]}' for row in rows]
        table(Path(f"a.{suffix}"), ["", *own[:4], "", "  ", *own[4:], ""], f"text{comma}label")
    return f"a.{suffix}"


def named():
    """A table whose columns only a user knows."""
    rows = [f'"{text}","{text} too",{"xy"[i % 2]}' for i, text in enumerate(PROSE)]
    table(Path("a.csv"), rows, "one,two,kind")


def images():
    photos(Path())
    table(Path("a.csv"), [f"{c}/{i}.jpg,{c}" for c in CLASSES for i in range(4)], "file,label")


def of_masks():
    masked("d")
    own = [f"images/{i}.jpg,masks/{i}.png" for i in range(8)]
    table(Path("d/a.csv"), own, "file,annotation")


def documents():
    for i, text in enumerate(PROSE):
        file = Path(f"d/{i}.md")
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{text}\n\n")


# What writes it, its name, the model, what else training is told, and how many rows there are.
KINDS = {
    **{kind: (lambda kind=kind: of_texts(kind), f"a.{kind}", "bert-base", {}, 8)
       for kind in ("csv", "tsv", "jsonl", "parquet")},
    "quoted texts": (lambda: texts(Path("a.csv")), "a.csv", "bert-base", {}, 12),
    "pairs": (
        lambda: table(Path("a.csv"), [f"a b {i},c d,{i % 2}" for i in range(8)],
                      "premise,hypothesis,label"),
        *("a.csv", "bert-base", {}, 8),
    ),
    "named columns": (named, "a.csv", "bert-base",
                      {"text_column": "two,one", "label_column": "kind"}, 8),
    "tables of splits": (lambda: splits(lambda split: texts(Path("d", f"{split}.csv"))),
                         "d", "bert-base", {}, 24),
    "texts": (lambda: Path("a.txt").write_text("\n\n\n".join(PROSE)), "a.txt", "gpt2", {}, 8),
    "a folder of texts": (documents, "d", "gpt2", {}, 8),
    "a text on each row": (lambda: table(Path("a.csv"), [f'"{text}"' for text in PROSE], "text"),
                           "a.csv", "gpt2", {}, 8),
    "chats": (lambda: lines("a.jsonl", [{"messages": TALK}] * 8), "a.jsonl", "gpt2", {}, 8),
    "ShareGPT": (lambda: lines("a.jsonl", [{"conversations": SHARED}] * 8),
                 "a.jsonl", "gpt2", {}, 8),
    "classes": (lambda: photos(Path("d")), "d", "vit-micro", {}, 12),
    "classes of splits": (lambda: splits(lambda split: photos(Path("d", split))),
                          "d", "vit-micro", {}, 24),
    "a table of images": (images, "a.csv", "vit-micro", {}, 12),
    "masks": (lambda: masked("d"), "d", "segformer-b0", {}, 8),
    "masks of splits": (lambda: splits(lambda split: masked("d", split=split)),
                        "d", "vit-b16", {}, 16),
    "a table of masks": (of_masks, "d/a.csv", "segformer-b0", {}, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_what_was_trained_on(case):
    write, name, model, settings, count = KINDS[case]
    write()
    trained = Job(model, name, **settings)
    source = data.source_of(trained)
    known = source.load()
    trained = replace(trained, task=source.task)  # as a run knows it
    plain = replace(trained, image_column=None, text_column=None)
    parts, skipped = whole.unlabeled([name], plain, source.modality, trained=trained)
    assert skipped == ()
    assert sum(len(part.good) for part in parts) == count
    inputs = {*known.train.column_names} - {"label", "mask"}
    for part in parts:
        assert {*part.data.column_names} == inputs
        assert len(part.data) == len([*part.places])
    if "image" not in inputs:
        own = [str(part.data[row]) for part in parts for row in range(len(part.data))]
        row = {key: value for key, value in known.train[0].items() if key in inputs}
        assert source.task == "causal-lm" or str(row) in own
    elif source.task == "segmentation":
        assert all(
            "images" in Path(file).parts
            for part in parts
            for file, row in part.places
            if row is None
        )


def test_empty_lines_are_no_rows_and_others_keep_their_numbers():
    Path("a.txt").write_text("\na b\n \n\nc d\n")
    (part,), skipped = whole.unlabeled(["a.txt"], Job("bert-base", ""), "text")
    assert (part.good.tolist(), skipped) == ([1, 4], ())
    (part,), _ = whole.unlabeled(["-"], Job("bert-base", ""), "text", ["", "a b"])
    assert part.good.tolist() == [1]


def test_labels_are_read_from_the_columns_of_training():
    named()
    trained = Job("bert-base", "", text_column="two", label_column="kind")
    found, *_ = whole.labeled(Job("bert-base", "a.csv"), "text", ("y", "x"), trained=trained)
    assert found[0] == {"text": f"{PROSE[0]} too", "label": 1}
    given = Job("bert-base", "a.csv", text_column="one")
    found, *_ = whole.labeled(given, "text", ("x", "y"), trained=trained)
    assert found[0] == {"text": PROSE[0], "label": 0}
    texts(Path("b.csv"))
    found, *_ = whole.labeled(Job("bert-base", "b.csv"), "text", ("neg", "pos"), trained=trained)
    assert len(found) == 12
    with pytest.raises(UsageError, match="several columns that may be the text"):
        whole.labeled(Job("bert-base", "a.csv"), "text", ("x", "y"))
    trained = Job("gpt2", "", text_column="two")
    found = own.find(Job("gpt2", "a.csv"), trained).load().train
    assert {text.endswith("too") for text in found["text"]} == {True}
