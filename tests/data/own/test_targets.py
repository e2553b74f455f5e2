"""Labels that are no single classes: what is read from every kind of file, and bad ones."""

import json
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from razorctl import data
from razorctl.data.own import whole
from razorctl.errors import DataError, RazorError, UsageError
from razorctl.job import Job
from tests import local_hub
from tests.own import picture

TEXTS = [f"a text of {i} words" for i in range(12)]
NUMBERS = [i / 3 for i in range(12)]


def written(columns, kind="jsonl", name="a"):
    """A file with these columns."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    file = Path(f"{name}.{kind}")
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "csv":
        lines = [",".join(json.dumps(value) for value in row.values()) for row in rows]
        file.write_text("\n".join([",".join(columns), *lines]) + "\n")
    else:
        Dataset.from_list(rows).to_parquet(file)
    return str(file)


def loaded(hub, columns, kind, **settings):
    """The source and the splits of a file of a kind, or of a set of the hub."""
    name = written(columns, "parquet" if kind == "hub" else kind)
    if kind == "hub":
        rows = Dataset.from_dict(columns)
        local_hub.cache(hub, "dataset", "some/set", lambda to: rows.to_parquet(to / "a.parquet"))
        name = "hf:some/set"
    source = data.of(Job("bert-base", name, **settings))
    return source, source.load()


def labels(splits):
    """Text -> label, of all rows."""
    return {row["text"]: row["label"] for part in splits.parts.values() for row in part}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "hub"])
def test_numbers(kind, hub):
    source, splits = loaded(hub, {"text": TEXTS, "score": NUMBERS}, kind)
    assert (source.task, source.classes, source.modality) == ("regression", 1, "text")
    assert source.details[1] == "for regression: score"
    assert splits.classes == ("score",)
    assert labels(splits) == pytest.approx(dict(zip(TEXTS, NUMBERS, strict=True)))
    assert (len(splits.train), len(splits.validation)) == (11, 1)


def test_whole_numbers_are_classes_unless_a_task_is_given(hub):
    columns = {"text": TEXTS, "label": [1, 2, 3] * 4}
    assert loaded(hub, columns, "csv")[0].task == "classification"
    source, splits = loaded(hub, columns, "csv", task="regression")
    assert source.task == "regression"
    assert labels(splits) == dict(zip(TEXTS, [1.0, 2.0, 3.0] * 4, strict=True))


def test_other_labels_are_other_data(hub):
    digests = [
        loaded(hub, {"text": TEXTS, "score": values}, "csv")[1].digests
        for values in (NUMBERS, [*NUMBERS[:-1], 9.25])
    ]
    assert digests[0] != digests[1]


def test_numbers_of_images():
    paths = [str(picture(Path(f"{i}.png"), 9 * i)) for i in range(12)]
    name = written({"image": paths, "age": NUMBERS}, "csv")
    source = data.of(Job("vit-micro", name, label_column="age"))
    assert (source.task, source.modality) == ("regression", "image")
    assert source.load().train[3]["label"] == pytest.approx(1)


def test_rows_of_other_data_for_a_run():
    """A run of numbers is evaluated on whole ones, too, whatever their column is called."""
    name = written({"text": TEXTS, "stars": [1, 2, 3] * 4}, "csv")
    job = Job("bert-base", name, task="regression", label_column="stars")
    rows, split, skipped = whole.labeled(job, "text", ["score"])
    assert (rows["label"][:], split, skipped) == ([1.0, 2.0, 3.0] * 4, None, ())


SETS = [
    [name for bit, name in enumerate(("red", "round", "soft")) if i >> bit & 1] for i in range(12)
]
FLAGS = {name: [int(name in names) for names in SETS] for name in ("red", "round", "soft")}
VECTORS = [[FLAGS[name][i] for name in FLAGS] for i in range(12)]
SEVERAL = {
    "lists of names": ({"labels": SETS}, {}, ("red", "round", "soft")),
    "lists of numbers": (
        {"labels": [[3 * [*FLAGS].index(name) for name in names] for names in SETS]},
        *({}, ("0", "3", "6")),
    ),
    "lists of 0 and 1": ({"labels": VECTORS}, {}, ("0", "1", "2")),
    "columns": (FLAGS, {"label_column": "red,round,soft"}, ("red", "round", "soft")),
    "all columns": (
        {"id": TEXTS, **FLAGS},
        {"task": "multi-label", "text_column": "text"},
        (*FLAGS,),
    ),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, kind) for case in SEVERAL for kind in ("jsonl", "parquet", "hub")),
        *(("columns", "csv"), ("all columns", "csv")),  # which has no lists
    ],
)
def test_several_labels(case, kind, hub):
    columns, settings, names = SEVERAL[case]
    source, splits = loaded(hub, {"text": TEXTS, **columns}, kind, **settings)
    assert (source.task, source.classes, splits.classes) == ("multi-label", 3, names)
    assert labels(splits) == dict(zip(TEXTS, VECTORS, strict=True))


def test_classes_of_lists_by_their_type(hub):
    numbers = [[[*FLAGS].index(name) for name in names] for names in SETS]
    kinds = Features({"text": Value("string"), "labels": List(ClassLabel(names=[*FLAGS]))})
    rows = Dataset.from_dict({"text": TEXTS, "labels": numbers}, kinds)
    local_hub.cache(hub, "dataset", "some/set", lambda to: rows.to_parquet(to / "a.parquet"))
    splits = data.of(Job("bert-base", "hf:some/set")).load()
    assert splits.classes == (*FLAGS,)
    assert labels(splits) == dict(zip(TEXTS, VECTORS, strict=True))


def test_several_labels_of_other_data_for_a_run():
    job = Job("bert-base", written({"text": TEXTS, "labels": SETS}), task="multi-label")
    rows, _, _ = whole.labeled(job, "text", ["soft", "red", "flat", "round"])
    assert rows["label"][:] == [[soft, red, 0, round_] for red, round_, soft in VECTORS]
    with pytest.raises(DataError, match="has labels that are no classes of the run: 'round'"):
        whole.labeled(job, "text", ["soft", "red"])


BAD_SETS = {
    "a share": ({"labels": [*SETS[1:4], ["red", 0.5]]}, {}, "line 4 (a label of 0.5, which is no"),
    "beyond 1": ({"labels": [*VECTORS, [1, 2, 0]]}, {}, "line 13 (a label of 2, not 0 or 1)"),
    "too few": ({"labels": [*VECTORS, [1, 0]]}, {}, "line 13 (2 labels, not 3 as others have)"),
    "no list": ({"labels": [*SETS[1:4], None]}, {}, "a.jsonl, line 4 (no labels)"),
    "a word": ({"labels": [*SETS[1:4], "red"]}, {}, "line 4 (the labels 'red' is no list)"),
    "nothing": ({"labels": [[]] * 6}, {"task": "multi-label"}, "has 0 labels in its lists"),
    "a name that is none": (
        {"labels": [*SETS[1:4], [" "]]},
        {},
        "a label of ' ', which is no name",
    ),
    "half a column": (
        {"red": [0, 1, 0.5, 1], "soft": [0, 1, 1, 0]},
        {"label_column": "red,soft"},
        "line 3 (the red 0.5 is not 0 or 1)",
    ),
    "an empty cell": (
        {"red": [0, 1, None, 1], "soft": [0, 1, 1, 0]},
        {"label_column": "red,soft"},
        "line 3 (no label)",
    ),
    "all 0": (
        {"red": [0] * 6, "soft": [0] * 6},
        {"label_column": "red,soft"},
        "no training row of a.jsonl has a label",
    ),
    "classes": (
        {"labels": SETS[1:5]},
        {"task": "classification"},
        "which are for multi-label (--t",
    ),
}


@pytest.mark.parametrize("case", BAD_SETS)
def test_bad_labels(case):
    columns, settings, said = BAD_SETS[case]
    count = len(next(iter(columns.values())))
    name = written({"text": [f"a text of {i} words" for i in range(count)], **columns})
    with pytest.raises(DataError) as error:
        data.of(Job("bert-base", name, **settings)).load()
    assert said in str(error.value)


UNCLEAR = {
    "columns": ({}, "choose with --label-column, or take all with --task multi-label"),
    "a column that is none": ({"label_column": "red,blue"}, "has no column blue, only text, red"),
    "one task": (
        {"label_column": "red,soft", "task": "classification"},
        "one column of labels for classification, not red, soft",
    ),
    "one column": (
        {"label_column": "red", "task": "multi-label"},
        "column red of a.csv has no lists of labels; name",
    ),
    "smoothing": ({"task": "multi-label", "label_smoothing": 0.1}, "is for multi-label; leave it"),
    "weights": ({"task": "multi-label", "class_weights": "balanced"}, "leave --class-weights out"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_unclear_columns_of_labels(case):
    settings, said = UNCLEAR[case]
    name = written({"text": TEXTS, **FLAGS}, "csv")
    with pytest.raises(RazorError) as error:
        data.check(Job("bert-base", name, **settings))
    assert said in str(error.value)


def test_labels_of_no_training_row_are_noted():
    for split, names in (("train", ["red", "soft"]), ("test", ["red", "flat"])):
        Path("d").mkdir(exist_ok=True)
        written(
            {"text": TEXTS, "labels": [names[: 1 + i % 2] for i in range(12)]}, name=f"d/{split}"
        )
    source = data.of(Job("bert-base", "d"))
    assert source.details[1] == "for 3 labels of a row each: flat, red, soft"
    assert source.load().notes[-1] == "1 label of 3 on no training row: flat."


TOKENS = [[f"word{j}" for j in range(1 + i % 4)] for i in range(12)]
TAGGED = [["B-PER", "O", "O", "B-LOC"][: len(tokens)] for tokens in TOKENS]
NAMES = ("O", "B-LOC", "B-PER")


def conll(name: str, rows=12, between=" ") -> str:
    sentences = [
        "\n".join(between.join((token, "NN", tag)) for token, tag in zip(*pair, strict=True))
        for pair in zip(TOKENS[:rows], TAGGED[:rows], strict=True)
    ]
    Path(name).write_text("-DOCSTART- -X- O\n\n" + "\n\n\n".join(sentences))
    return name


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub", "conll", "iob2"])
def test_tags(kind, hub):
    if kind in ("conll", "iob2"):
        name = conll(f"a.{kind}", between="\t" if kind == "iob2" else " ")
        source = data.of(Job("bert-base", name))
        splits = source.load()
    else:
        columns = {"id": TEXTS, "tokens": TOKENS, "pos_tags": TOKENS, "ner_tags": TAGGED}
        source, splits = loaded(hub, columns, kind)
    assert (source.task, source.classes, splits.classes) == ("token-classification", 3, NAMES)
    assert (source.metric, source.details[1]) == (None, "for 3 tags of tokens: O, B-LOC, B-PER")
    rows = [row for part in splits.parts.values() for row in part]
    found = [(row["tokens"], [NAMES[number] for number in row["label"]]) for row in rows]
    assert sorted(found) == sorted(zip(TOKENS, TAGGED, strict=True))


def test_tags_that_are_no_entities_are_judged_by_their_accuracy():
    written({"words": TOKENS, "tags": [["NN", "VB", "NN", "IN"][: len(t)] for t in TOKENS]})
    assert data.of(Job("bert-base", "a.jsonl")).metric == "accuracy"


def test_numbers_of_tags_have_the_names_in_a_file():
    numbers = [[NAMES.index(tag) for tag in tags] for tags in TAGGED]
    name = written({"tokens": TOKENS, "ner_tags": numbers})
    assert data.of(Job("bert-base", name)).load().classes == ("0", "1", "2")
    Path("classes.txt").write_text("\n".join(NAMES))
    assert data.of(Job("bert-base", name)).load().classes == NAMES


def test_tags_of_other_data_for_a_run():
    job = Job("bert-base", conll("a.conll"), task="token-classification")
    rows, _, _ = whole.labeled(job, "text", ["B-LOC", "B-ORG", "B-PER", "O"])
    assert rows["label"][3] == [2, 3, 3, 0]
    with pytest.raises(DataError, match="has labels that are no classes of the run: 'B-LOC'"):
        whole.labeled(job, "text", ["O", "B-PER"])


BAD_TAGS = {
    "too few": ({"tokens": [["a", "b"]], "tags": [["O"]]}, "line 1 (1 tag for 2 tokens)"),
    "none": ({"tokens": [["a", "b"]], "tags": [None]}, "line 1 (no tags)"),
    "no tokens": ({"tokens": [[]], "tags": [[]]}, "line 1 (no tokens)"),
    "a tag that is none": ({"tokens": [["a", "b"]], "tags": [["O", ""]]}, "a tag of '', which is"),
    "a token that is none": ({"tokens": [["a", " "]], "tags": [["O", "O"]]}, "a token of ' ', wh"),
    "a share": ({"tokens": [["a"]], "tags": [[0.5]]}, "a tag of 0.5, which is no name and no whol"),
}


@pytest.mark.parametrize("case", BAD_TAGS)
def test_bad_tags(case):
    columns, said = BAD_TAGS[case]
    more = {"tokens": TOKENS, "tags": TAGGED}
    name = written({name: [*own, *more[name]] for name, own in columns.items()})
    with pytest.raises(DataError) as error:
        data.of(Job("bert-base", name)).load()
    assert said in str(error.value)


UNTAGGED = {
    "one tag": ([["O"]] * 4, {}, "all tokens of a.jsonl have one tag, O; a tagger needs two"),
    "no tags": (None, {"task": "token-classification"}, "no lists of tokens with a tag each"),
    "another task": ([["O"]] * 4, {"task": "classification"}, "which are for token-classification"),
    "images": ([["O"]] * 4, {"model": "vit-micro"}, "which are for token-classification, and vit"),
}


@pytest.mark.parametrize("case", UNTAGGED)
def test_tags_that_nothing_can_be_learned_from(case):
    tags, settings, said = UNTAGGED[case]
    columns = {"tokens": [["a"]] * 4} | ({} if tags is None else {"tags": tags})
    name = written(columns)
    with pytest.raises(RazorError) as error:
        data.of(Job(**{"model": "bert-base", "dataset": name, **settings}))
    assert said in str(error.value)


def test_a_line_without_a_tag_in_conll():
    conll("a.conll")
    with Path("a.conll").open("a") as file:
        file.write("\n\n# id 7\n# O\nalone\n")
    with pytest.raises(DataError, match=r"a.conll, line \d+ \(1 tag for 2 tokens\)"):
        data.of(Job("bert-base", "a.conll")).load()


REGRESSION = {"task": "regression"}
BAD = {
    "words among numbers": ([*NUMBERS[:3], "good"], {}, "line 5 (the label 'good' is no number)"),
    "a number that is none": ([*NUMBERS[:3], "nan"], {}, "line 5 (the label nan is not finite)"),
    "an infinite number": ([*NUMBERS[:3], "inf"], {}, "line 5 (the label inf is not finite)"),
    "no number": ([*NUMBERS[:3], ""], {}, "a.csv, line 5 (no label)"),
    "truth": ([*NUMBERS[:3], "true"], {}, "the label 'true' is no number"),
    "words": (["a", "b", "c", "d"], REGRESSION, "has 4 bad rows: a.csv, line 2 (the label 'a'"),
    "one number": ([0.5] * 4, {}, "have the label 0.5; a regression needs two or more"),
    "classes": (NUMBERS[:4], {"task": "classification"}, "--task regression), not classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_numbers(case):
    values, settings, said = BAD[case]
    name = written({"text": TEXTS[: len(values)], "label": values}, "csv")
    with pytest.raises(DataError) as error:
        data.of(Job("bert-base", name, **settings)).load()
    assert said in str(error.value)


def test_bad_numbers_are_left_out_if_asked(caplog):
    name = written({"text": TEXTS, "score": [*NUMBERS[:-1], "bad"]}, "csv")
    splits = data.of(Job("bert-base", name, skip_bad=True)).load()
    assert splits.skipped == ("a.csv, line 13 (the score 'bad' is no number)",)
    assert len(splits.train) == 10


def test_large_numbers_are_noted():
    name = written({"text": TEXTS, "price": [1000.5 * i for i in range(12)]}, "csv")
    (note,) = data.of(Job("bert-base", name, label_column="price")).load().notes
    assert "between 0 and 11,005" in note or "between 1,000.5 and 11,005" in note


REFUSED = {
    "smoothing": ({"label_smoothing": 0.1}, "a.csv is for regression; leave it out"),
    "mixup": ({"mixup": 0.1, "model": "vit-micro"}, "vit-micro takes images, and a.csv has texts"),
    "metric": ({"metric": "f1"}, "unknown metric of regression 'f1'"),
    "streaming": ({"streaming": True}, "is for regression, which reads it whole"),
    "a model of other tasks": ({"task": "segmentation"}, "no images with masks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_numbers_have_no_use_for(case):
    settings, said = REFUSED[case]
    name = written({"text": TEXTS, "score": NUMBERS}, "csv")
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        data.check(Job(**{"model": "bert-base", "dataset": name, **settings}))


def test_folders_have_no_numbers():
    picture(Path("d/a/1.png"))
    with pytest.raises(RazorError, match="d has no label for each row, which regression learns"):
        data.of(Job("vit-micro", "d", task="regression"))
