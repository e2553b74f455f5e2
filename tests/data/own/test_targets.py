"""Labels that are no single classes: what is read from every kind of file, and bad ones."""

from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import whole
from razorctl.data.own.fields import FIELDS
from razorctl.data.own.read.lines import conll as conll_lines
from razorctl.errors import DataError, RazorError, UsageError
from tests import local_hub
from tests.own import picture, refuses, written

TEXTS = [f"a text of {i} words" for i in range(12)]
NUMBERS = [i / 3 for i in range(12)]


def loaded(hub, columns, kind, **settings):
    """The source and the splits of a file of a kind, or of a set of the hub."""
    name = written(columns, "parquet" if kind == "hub" else kind)
    if kind == "hub":
        rows = Dataset.from_dict(columns)
        local_hub.cache(hub, "dataset", "some/set", lambda to: rows.to_parquet(to / "a.parquet"))
        name = "hf:some/set"
    source = data.source_of(Job("bert-base", name, **settings))
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


def test_other_labels_are_other_data(hub):
    digests = [
        loaded(hub, {"text": TEXTS, "score": values}, "csv")[1].digests
        for values in (NUMBERS, [*NUMBERS[:-1], 9.25])
    ]
    assert digests[0] != digests[1]


IN_FOLDERS = {
    "a list of images": ("metadata.jsonl", "file_name", {"score": NUMBERS}, "regression"),
    "the only table": ("names.csv", "image", {"score": NUMBERS}, "regression"),
    "lists of labels": (
        "metadata.jsonl",
        "file_name",
        {"labels": [["a", "b"][i % 2 :] for i in range(12)]},
        "multi-label",
    ),
}


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("case", IN_FOLDERS)
def test_a_table_beside_its_images(case, split):
    file, column, labels, task = IN_FOLDERS[case]
    if split and not file.startswith("metadata"):
        return
    paths = [f"{i}.png" for i in range(12)]
    for i, path in enumerate(paths):
        picture(Path("photos", split, "images", path), 9 * i)
    columns = {column: [f"images/{path}" for path in paths], **labels}
    written(columns, file.rpartition(".")[2], f"photos/{split}{Path(file).stem}")
    source = data.source_of(Job("vit-micro", "photos"))
    assert (source.task, source.modality) == (task, "image")
    assert len(source.load().train) == 11


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
        *((case, "csv") for case in SEVERAL),  # whose lists are texts
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
    splits = data.source_of(Job("bert-base", "hf:some/set")).load()
    assert splits.classes == (*FLAGS,)
    assert labels(splits) == dict(zip(TEXTS, VECTORS, strict=True))


def test_several_labels_of_other_data_for_a_run():
    job = Job("bert-base", written({"text": TEXTS, "labels": SETS}), task="multi-label")
    rows, _, _ = whole.labeled(job, "text", ["soft", "red", "flat", "round"])
    assert rows["label"][:] == [[soft, red, 0, round_] for red, round_, soft in VECTORS]
    with pytest.raises(DataError, match="has labels that are not classes of the run: 'round'"):
        whole.labeled(job, "text", ["soft", "red"])


LISTS = {
    "JSON": ('["a", "caf\\u00e9, b"]', ["a", "café, b"]),
    "Python": ("['a', \"it's\",]", ["a", "it's"]),
    "NumPy": ("['a' 'b']", ["a", "b"]),
    "NumPy's numbers": ("[0. 1. 1.]", ["0", "1", "1"]),
    "truth": ("[True, false]", ["1", "0"]),
    "none": ("[]", []),
    "JSON's escapes": (
        r'["a\/b", "\ud83d\ude00", "\"c\"", "d\u2028e"]',
        ["a/b", "😀", '"c"', "d\u2028e"],
    ),
    "Python's escapes": (r"['a\'b', '\xe9', '\N{GRINNING FACE}']", ["a'b", "é", "😀"]),
    "numbers of JSON": ("[1e0, -0, 2]", ["1", "0", "2"]),
    "a large number": ("[12345678901234567890123]", ["12345678901234567890123"]),
    "signs of lists in names": (r'["[a]", "b, c]", "\\"]', ["[a]", "b, c]", "\\"]),
    "no list": ("[a text]", None),
    "an odd escape": (r"['\x']", None),
    "lists of lists": ("[[1], [2]]", None),
    "half a character of JSON": (r'["\ud83d"]', None),
    "half a character of Python": (r"['\ud83d']", None),
    "nothing among names": ('["a", null]', None),
    "a number that is none": ("[1, NaN]", None),
    "numbers with zeros before them": ("[007, 012]", None),
    "cut off": ('["a", "b', None),
    "a set": ("{'a', 'b'}", ["a", "b"]),
    "a tuple": ("('a',)", ["a"]),
    "a mapping": ('{"a": 1}', None),
    "words in brackets": ("('a' or so)", None),
    "nested deeply": ("[" * 100_000, None),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_in_texts(case):
    written_so, want = LISTS[case]
    value, fault = FIELDS["labels"].of_line(written_so, "labels", Path())
    assert (value, fault is None) == (want, want is not None)


# A list that is malformed or has other values, beside others; what is said of it.
MALFORMED = {
    "cut off": ('["red", "so', "is not a list"),
    "a number": ('["red", 0.5]', "a label of 0.5"),
    "nothing": ('["red", null]', "a label of None"),
    "half a character": (r'["\udc00"]', "half a character"),
    "lists": ('[["red"]]', "a label of ['red']"),
}


@pytest.mark.parametrize("column", ["labels", "colors"])
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_list_among_lists_is_a_bad_row(case, column):
    bad, said = MALFORMED[case]
    lists = [bad, *['["red", "soft"]', '["soft"]'] * 6]
    name = written({"text": ["a bad text", *TEXTS], column: lists})
    with pytest.raises(DataError) as error:
        data.source_of(Job("bert-base", name)).load()
    assert "a.jsonl, line 1 (" in str(error.value)
    assert said in str(error.value)
    splits = data.source_of(Job("bert-base", name, skip_bad=True)).load()
    assert splits.classes == ("red", "soft")
    assert len(splits.skipped) == 1


def test_classes_that_begin_as_lists_are_classes():
    ranges = ["[0, 10)", "[10, 20)"] * 6
    splits = data.source_of(
        Job("bert-base", written({"text": TEXTS, "label": ranges}, "csv"))
    ).load()
    assert splits.classes == ("[0, 10)", "[10, 20)")


def test_tags_in_texts_are_read_as_json():
    tags = [r'["B-a\/b", "O"]', "['O' 'B-a/b']", '["O", "B-a/b"', '["O", "O"]'] * 3
    columns = {"tokens": ['["one", "\\ud83d\\ude00"]'] * 12, "tags": tags}
    splits = data.source_of(Job("bert-base", written(columns), skip_bad=True)).load()
    assert splits.classes == ("O", "B-a/b")
    assert splits.train[0]["tokens"] == ["one", "😀"]
    assert len(splits.skipped) == 3


def test_labels_of_no_training_row_are_noted():
    for split, names in (("train", ["red", "soft"]), ("test", ["red", "flat"])):
        Path("d").mkdir(exist_ok=True)
        written(
            {"text": TEXTS, "labels": [names[: 1 + i % 2] for i in range(12)]}, name=f"d/{split}"
        )
    source = data.source_of(Job("bert-base", "d"))
    assert source.details[1] == "multi-label, 3 labels: flat, red, soft"
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


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "hub", "conll", "iob2", "txt", "tsv"])
def test_tags(kind, hub):
    if kind in ("conll", "iob2", "txt", "tsv"):
        name = conll(f"a.{kind}", between="\t" if kind in ("iob2", "tsv") else " ")
        source = data.source_of(Job("bert-base", name))
        splits = source.load()
    else:
        columns = {"id": TEXTS, "tokens": TOKENS, "pos_tags": TOKENS, "ner_tags": TAGGED}
        source, splits = loaded(hub, columns, kind)
    assert (source.task, source.classes, splits.classes) == ("token-classification", 3, NAMES)
    assert (source.metric, source.details[1]) == (None, "for 3 tags of tokens: O, B-LOC, B-PER")
    rows = [row for part in splits.parts.values() for row in part]
    found = [(row["tokens"], [NAMES[number] for number in row["label"]]) for row in rows]
    assert sorted(found) == sorted(zip(TOKENS, TAGGED, strict=True))


def test_tags_in_the_line_of_their_sentence():
    lines = [
        " ".join(f"{token}|NN|{tag}" for token, tag in zip(*pair, strict=True))
        for pair in zip(TOKENS, TAGGED, strict=True)
    ]
    Path("wiki.txt").write_text("\n\n".join(lines))
    splits = data.source_of(Job("bert-base", "wiki.txt")).load()
    assert splits.classes == NAMES
    assert sorted(row["tokens"] for part in splits.parts.values() for row in part) == sorted(TOKENS)


def test_tags_that_are_no_entities_are_judged_by_their_accuracy():
    written({"words": TOKENS, "tags": [["NN", "VB", "NN", "IN"][: len(t)] for t in TOKENS]})
    assert data.source_of(Job("bert-base", "a.jsonl")).metric == "accuracy"


def test_numbers_of_tags_have_the_names_in_a_file():
    numbers = [[NAMES.index(tag) for tag in tags] for tags in TAGGED]
    name = written({"tokens": TOKENS, "ner_tags": numbers})
    assert data.source_of(Job("bert-base", name)).load().classes == ("0", "1", "2")
    Path("classes.txt").write_text("\n".join(NAMES))
    assert data.source_of(Job("bert-base", name)).load().classes == NAMES


def test_labels_of_skipped_rows_may_be_no_classes_of_a_run():
    rows = Dataset.from_dict({"text": ["a b", "c d", " "], "label": [0, 1, 2]})
    rows.cast_column("label", ClassLabel(names=["good", "bad", "odd"])).to_parquet("a.parquet")
    job = Job("bert-base", "a.parquet", skip_bad=True)
    found, _, skipped = whole.labeled(job, "text", ["bad", "good"])
    assert (found["label"][:], len(skipped)) == ([1, 0], 1)
    with pytest.raises(DataError, match="not classes of the run: 'good'"):
        whole.labeled(job, "text", ["bad", "odd"])


def test_tags_of_other_data_for_a_run():
    job = Job("bert-base", conll("a.conll"), task="token-classification")
    rows, _, _ = whole.labeled(job, "text", ["B-LOC", "B-ORG", "B-PER", "O"])
    assert rows["label"][3] == [2, 3, 3, 0]
    with pytest.raises(DataError, match="has labels that are not classes of the run: 'B-LOC'"):
        whole.labeled(job, "text", ["O", "B-PER"])


def test_a_blank_token_ends_no_sentence_in_conll():
    """Some corpora have tokens that are a space which is not ASCII."""
    Path("a.conll").write_text("a\tO\n\xa0\tO\nb\tB-PER\n")
    assert next(conll_lines(Path("a.conll"))).values["1"] == ["a", "\xa0", "b"]


def test_a_line_without_a_tag_in_conll():
    conll("a.conll")
    with Path("a.conll").open("a") as file:
        file.write("\n\n# id 7\n# O\nalone\n")
    refuses(DataError, r"a.conll, line \d+ \(lines of 1 and 3 columns\)", "bert-base", "a.conll")
    conll("a.conll")
    with Path("a.conll").open("a") as file:
        file.write("\n\na NN O\nb NN\n")  # whose tag is missing
    refuses(DataError, r"a.conll, line \d+ \(lines of 2 and 3 columns\)", "bert-base", "a.conll")


def test_bad_numbers_are_left_out_if_asked(caplog):
    name = written({"text": TEXTS, "score": [*NUMBERS[:-1], "bad"]}, "csv")
    splits = data.source_of(Job("bert-base", name, skip_bad=True)).load()
    assert splits.skipped == ("a.csv, line 13 (the score 'bad' is not a number)",)
    assert len(splits.train) == 10


@pytest.mark.parametrize("unit", [1000.5, 1e-5])
def test_numbers_of_another_size_are_noted(unit):
    name = written({"text": TEXTS, "price": [unit * i for i in range(12)]}, "csv")
    (note,) = data.source_of(Job("bert-base", name, label_column="price")).load().notes
    least, most = f"{unit:,g}", f"{11 * unit:,g}"
    assert f"between 0 and {most}" in note or f"between {least} and {most}" in note
    assert note.endswith("so that labels are about 1." if unit > 1 else "use a smaller unit.")


def test_scores_are_classes_only_if_they_are_few(hub):
    columns = {"text": TEXTS, "rating": [float(i) for i in range(12)]}
    assert loaded(hub, columns, "parquet")[0].task == "regression"
    columns["rating"] = [float(i % 3) for i in range(12)]
    assert loaded(hub, columns, "parquet")[0].task == "classification"


SECRET = {
    "regression": (NUMBERS, -1),
    "classification": (["red", "soft", "red"] * 4, ""),
    "multi-label": (SETS, []),
    "token-classification": (None, []),
}


@pytest.mark.parametrize("kind", ["jsonl", "hub", "without a column"])
@pytest.mark.parametrize("task", SECRET)
def test_a_split_whose_labels_are_secret_is_left_out(kind, task, hub):
    """Tests of contests are so; who asks for the split is told what it lacks."""
    given, secret = SECRET[task]
    columns = {"text": TEXTS, "label": given}
    if given is None:
        columns = {"tokens": TOKENS, "tags": TAGGED}
    label = [*columns][1]
    parts = {"train": columns, "test": {**columns, label: [secret] * 12}}
    if kind == "hub":
        kinds = Dataset.from_dict(columns).features
        rows = {split: Dataset.from_dict(part, kinds) for split, part in parts.items()}
        local_hub.cache(
            *(hub, "dataset", "some/set"),
            lambda to: [rows[s].to_parquet(to / f"{s}.parquet") for s in rows],
        )
    else:
        Path("d").mkdir()
        if kind == "without a column":
            del parts["test"][label]
        for split, part in parts.items():
            written(part, name=f"d/{split}")
    source = data.source_of(Job("bert-base", "hf:some/set" if kind == "hub" else "d"))
    left = "test" if kind == "hub" else "test.jsonl"
    assert source.details[0].endswith(f", without {left}, which has no labels")
    assert source.details[2] == "11 rows to train on, 1 held out for validation"
    if kind == "without a column":
        refuses(DataError, f"has no column {label}", "bert-base", "d", split="train,,test")


def tagged(tokens, tags):
    """Good rows after others."""
    return {"tokens": [*tokens, *TOKENS], "tags": [*tags, *TAGGED]}


HALVES = {"red": [0, 1, 0.5, 1], "soft": [0, 1, 1, 0]}
EMPTY = {"red": [0, 1, None, 1], "soft": [0, 1, 1, 0]}
ZEROS = {"red": [0] * 6, "soft": [0] * 6}
ONE_TAG = {"tokens": [["a"]] * 4, "tags": [["O"]] * 4}
ROWS_OF_TOKENS = {"sentence #": ["1", "", "2", ""], "word": [*"abcd"], "tag": ["O"] * 4}
BOTH, NUMBERED, CLASSED = "red,soft", {"task": "regression"}, {"task": "classification"}
# Columns, settings, and a part of the error. Tables with a label, or of FLAGS, are CSV.
BAD = {
    "a share": (
        {"labels": [*SETS[1:4], ["red", 0.5]]},
        {},
        "line 4 (a label of 0.5, which is neither",
    ),
    "beyond 1": ({"labels": [*VECTORS, [1, 2, 0]]}, {}, "line 13 (a label of 2, not 0 or 1)"),
    "too few": ({"labels": [*VECTORS, [1, 0]]}, {}, "line 13 (2 labels, not 3 as others have)"),
    "no list": ({"labels": [*SETS[1:4], None]}, {}, "a.jsonl, line 4 (no labels)"),
    "a word": ({"labels": [*SETS[1:4], "red"]}, {}, "line 4 (the labels 'red' is not a list)"),
    "nothing": ({"labels": [[]] * 6}, {"task": "multi-label"}, "has 0 labels in its lists"),
    "a name that is none": (
        {"labels": [*SETS[1:4], [" "]]},
        {},
        "a label of ' ', which is not a nam",
    ),
    "half a column": (HALVES, {"label_column": BOTH}, "line 3 (the red 0.5 is not 0 or 1)"),
    "an empty cell": (EMPTY, {"label_column": BOTH}, "line 3 (no label)"),
    "all 0": (ZEROS, {"label_column": BOTH}, "no training row o"),
    "lists for classes": ({"labels": SETS[1:5]}, CLASSED, "which are for multi-label (--"),
    "too few tags": (tagged([["a", "b"]], [["O"]]), {}, "line 1 (1 tag for 2 tokens)"),
    "no tags": (tagged([["a", "b"]], [None]), {}, "line 1 (no tags)"),
    "no tokens": (tagged([[]], [[]]), {}, "line 1 (no tokens)"),
    "tags that are none": (tagged([["a", "b"]], [["", None]]), {}, "line 1 (no tags)"),
    "a token that is none": (tagged([["a", " "]], [["O", "O"]]), {}, "a token of ' ', wh"),
    "a share for a tag": (tagged([["a"]], [[0.5]]), {}, "a tag of 0.5, which is neither a name"),
    "one tag": (ONE_TAG, {}, "all tokens of a.jsonl have one tag, O; a tagger needs two"),
    "words among numbers": (
        {"label": [*NUMBERS[:3], "good"]},
        {},
        "(the label 'good' is not a num",
    ),
    "a number that is none": ({"label": [*NUMBERS[:3], "nan"]}, {}, "line 5 (no label)"),
    "an infinite number": ({"label": [*NUMBERS[:3], "inf"]}, {}, "(the label inf is not finite)"),
    "no number": ({"label": [*NUMBERS[:3], ""]}, {}, "a.csv, line 5 (no label)"),
    "truth": ({"label": [*NUMBERS[:3], "true"]}, {}, "the label 'true' is not a number"),
    "words": ({"label": [*"abcd"]}, NUMBERED, "has 4 bad rows: a.csv, line 2 (the label 'a'"),
    "a decimal comma": ({"label": ["0,5", "1,5", "2.5", "3,5"]}, {}, "'0,5' has a comma: w"),
    "each its own": ({"label": [10, 20, 30, 40]}, {"label_column": "label"}, "label of its own;"),
    "one number": ({"label": [0.5] * 4}, {}, "have the label 0.5; a regression needs two or more"),
    "numbers for classes": ({"label": NUMBERS[:4]}, CLASSED, "--task regression), not classes"),
}
UNCLEAR = {
    "tags for classes": (ONE_TAG, CLASSED, "which are for token-classification"),
    "tags for images": (ONE_TAG, {"model": "vit-micro"}, "which are for token-classification, and"),
    "columns": (FLAGS, {}, "choose with --label-column, or take all with --task multi-label"),
    "a column that is none": (FLAGS, {"label_column": "red,blue"}, "no column blue, only"),
    "one task": (FLAGS, {"label_column": BOTH, **CLASSED}, "one column of labels fo"),
    "one column": (FLAGS, {"label_column": "red", "task": "multi-label"}, "red of a.csv has no li"),
    "smoothing": (FLAGS, {"task": "multi-label", "label_smoothing": 0.1}, "multi-label; leave it"),
    "weights": (
        FLAGS,
        {"task": "multi-label", "class_weights": "balanced"},
        "leave --class-weights out",
    ),
    "a token on each row": (ROWS_OF_TOKENS, {}, "has a token on each row, by its columns word"),
    "no lists": ({"tokens": [["a"]] * 4}, {"task": "token-classification"}, "no lists of tokens"),
    "smoothing of numbers": ({"label": NUMBERS}, {"label_smoothing": 0.1}, "regression; leave it"),
    "a metric of classes": ({"label": NUMBERS}, {"metric": "f1"}, "unknown metric of regression"),
    "another task": ({"label": NUMBERS}, {"task": "segmentation"}, "no images with masks"),
}


@pytest.mark.parametrize("case", [*BAD, *UNCLEAR])
def test_labels_that_nothing_can_be_learned_from(case):
    columns, settings, said = (BAD | UNCLEAR)[case]
    texts = [f"a text of {i} words" for i in range(len(next(iter(columns.values()))))]
    plain = {} if {"tokens", "word"} & columns.keys() else {"text": texts}
    name = written(
        {**plain, **columns}, "csv" if "label" in columns or columns is FLAGS else "jsonl"
    )
    with pytest.raises(DataError if case in BAD else UsageError) as error:
        data.check(Job(**{"model": "bert-base", "dataset": name, **settings})).load()
    assert said in str(error.value)


def test_folders_have_no_numbers():
    picture(Path("d/a/1.png"))
    with pytest.raises(RazorError, match="d has no label for each row, which regression learns"):
        data.source_of(Job("vit-micro", "d", task="regression"))
