"""Data that are refused: each case is one error of its class, which names what is wrong."""

import json
import math
import os
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from razorctl import data
from razorctl.config.job import Job
from razorctl.errors import DataError, UsageError
from tests.own import CLASSES, floats, photos, picture, table, texts

LONG = 5000 * "a"
ODD = os.fsdecode(b"n\xff")
D, CSV, PARQUET = Path("d"), Path("a.csv"), Path("a.parquet")


def truncate(file: Path, keep: float = 0.6) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def folder(*more) -> None:
    """A good folder of classes, with what is written after it."""
    photos(D)
    for write in more:
        write()


def images(*rows: str) -> None:
    """A table of good images and of the given rows."""
    photos(Path())
    good = [f"{name}/{i}.jpg,{name}" for name in CLASSES for i in range(4)]
    table(CSV, [*good, *rows], "image,label")


def json_lines(*lines: str) -> None:
    good = [json.dumps({"text": f"a text {i}", "label": "ab"[i % 2]}) for i in range(12)]
    Path("a.jsonl").write_text("\n".join([*good, *lines]))


def mixed_parquet() -> None:
    for split, labels in (("train", [0, 1]), ("test", ["x", "y"])):
        Dataset.from_dict({"text": ["a b", "c d"], "label": labels}).to_parquet(
            f"d/{split}.parquet"
        )


def splits(*names: str) -> None:
    for split in names:
        photos(Path("d", split))


def link() -> None:
    images("linked.jpg,car")
    Path("..", "secret.jpg").write_bytes(Path("car/0.jpg").read_bytes())
    Path("linked.jpg").symlink_to("../secret.jpg")


def address() -> None:
    """A table with the address of an image, which is also the path of a good file."""
    files = [str(picture(Path(f"{i}.png"), 9 * i)) for i in range(7)]
    picture(Path("http:/localhost/a.png"))
    rows = [{"bytes": None, "path": name} for name in (*files, "http://localhost/a.png")]
    Dataset.from_dict({"image": rows, "label": [0, 1] * 4}).to_parquet(PARQUET)


def huge() -> None:
    Image.MAX_IMAGE_PIXELS = 200  # which the fixture puts back
    picture(Path("d/car/huge.png"), size=(201, 1))


def rows(*lines: str, header: str = "text,label"):
    return lambda: table(CSV, lines, header)


def bad_image(write, name="d/car/0.jpg"):
    return lambda: folder(lambda: write(Path(name)))


def png(break_file):
    return lambda: folder(lambda: break_file(picture(Path("d/car/0.png"), size=(90, 90))))


NONE = lambda: None  # noqa: E731
# What is written, the name, a word of the error, settings.
USAGE = {
    "no such thing": (NONE, "digit", "did you mean"),
    "a name of the hub": (NONE, "stanfordnlp/imdb", "or write hf:stanfordnlp/imdb"),
    "no such path": (NONE, "./digits", "./digits does not exist"),
    "another kind": (Path("a.txt").touch, "a.txt", "not a known kind of table; give CSV"),
    "no set of the hub": (NONE, "hf:one", "write hf:ORG/NAME:CONFIG"),
    "a path that is too long": (NONE, f"./{LONG}", "does not exist"),
    "a name that is too long": (NONE, LONG, "sets of the hub"),
    "the same split twice": (lambda: splits("train", "val", "valid"), "d", "val and valid"),
    "a JSON document": (lambda: Path("a.json").write_text('{"rows": 1}'), "a.json", "document"),
    "tables of several kinds": (
        lambda: (texts(Path("d/train.csv")), texts(Path("d/test.tsv"))),
        "d",
        ".csv, .tsv",
    ),
    "no such column": (rows("a b,x"), "a.csv", "column y", {"label_column": "y"}),
    "a column used twice": (
        *(rows("a b,x"), "a.csv", "used twice", {"label_column": "text", "text_column": "text"}),
    ),
    "splits of one file": (rows("a b,x"), "a.csv", "no splits", {"split": "a,b"}),
    "no such split": (lambda: splits("train"), "d", "no split dev", {"split": "train,dev"}),
    "validation twice": (lambda: splits("train", "val"), "d", "held out", {"validation": 0.2}),
    "nothing to evaluate on": (folder, "d", "give --validation", {"validation": 0.0}),
    "a share of all": (folder, "d", "outside", {"validation": 1.0}),
    "columns of a registered set": (NONE, "digits", "its own", {"label_column": "y"}),
    "images and texts": (
        NONE,
        "d",
        "images or texts; name one column",
        {"image_column": "a", "text_column": "b"},
    ),
    **{
        f"columns by no names: {text}": (NONE, "d", "such as text=title,label=st", {"column": text})
        for text in ("title", "text=", "=a", "text=a,", "text=a,text=b", "")
    },
    "texts for images": (lambda: texts(CSV), "a.csv", "vit-micro takes images"),
}
BAD = {
    "an archive": (Path("a.zip").touch, "a.zip", "unpack it"),
    "an empty folder": (D.mkdir, "d", "no folders with images"),
    "an empty class": (lambda: folder(Path("d/van").mkdir), "d", "van (a class folder without"),
    "one class": (lambda: photos(D, 4, ["car"]), "d", "of one class, car"),
    "an empty split": (
        lambda: (splits("train"), Path("d/test/car").mkdir(parents=True)),
        "d",
        "test of d",
    ),
    "a class of the test alone": (
        lambda: (splits("train", "test"), picture(Path("d/test/van/0.jpg"))),
        "d",
        "1 class that",
    ),
    "an image of no class": (bad_image(picture, "d/loose.jpg"), "d", "loose.jpg (in no class"),
    "an archive among images": (bad_image(Path.touch, "d/car/more.zip"), "d", "car/more.zip (an"),
    "one row of each class": (lambda: photos(D, 1), "d", "none can be held out"),
    "an image whose name is not UTF-8": (
        bad_image(lambda file: file.rename(Path("d/car", f"{ODD}.jpg"))),
        "d",
        "car/n?.jpg (its",
    ),
    "a class whose name is not UTF-8": (bad_image(picture, f"d/{ODD}/0.jpg"), "d", "n?/0.jpg (its"),
    "a folder whose name is not UTF-8": (lambda: photos(Path(ODD)), ODD, "n?: its name"),
    "a table whose name is not UTF-8": (
        lambda: (texts(Path("d/train.csv")), texts(Path("d", f"{ODD}.csv"))),
        "d",
        "d/n?.csv: its",
    ),
    "zero bytes": (bad_image(lambda file: file.write_bytes(b"")), "d", "car/0.jpg (zero bytes)"),
    "a truncated JPEG": (bad_image(lambda file: truncate(file, 0.99)), "d", "0.jpg (truncated)"),
    "a truncated PNG": (png(truncate), "d", "car/0.png (truncated)"),
    "another file": (bad_image(lambda file: file.write_text("hello")), "d", "0.jpg (no image of"),
    "a damaged image": (png(damage), "d", "car/0.png (damaged: broken"),
    "a huge image": (lambda: folder(huge), "d", "huge.png (201 x 1 pixels"),
    "a dead link": (
        bad_image(lambda file: file.symlink_to("nothing"), "d/car/x.jpg"),
        "d",
        "x.jpg (missing)",
    ),
    "pixels that are no numbers": (
        bad_image(lambda f: floats(f, [0.5, math.nan, math.inf]), "d/car/0.tif"),
        "d",
        "0.tif (2 of",
    ),
    "a missing image": (lambda: images("none.jpg,car"), "a.csv", "here/none.jpg (missing)"),
    "a long image path": (lambda: images(f"{LONG}.jpg,car"), "a.csv", "line 14 (File name too"),
    "no image path": (lambda: images(",car"), "a.csv", "a.csv, line 14 (no image path)"),
    "a path upwards": (lambda: images("../a.jpg,car"), "a.csv", "line 14 (outside the folder"),
    "an absolute path": (lambda: images("/etc/a.jpg,car"), "a.csv", "(outside the folder"),
    "an address": (lambda: images("https://a.org/a.jpg,car"), "a.csv", "line 14 (an address"),
    "an address as Parquet has it": (address, "a.parquet", "a.parquet, row 7 (an address"),
    "a link upwards": (link, "a.csv", "line 14 (outside the folder"),
    "a member of an archive": (lambda: images("m.zip/a.jpg,car"), "a.csv", "line 14 (inside an a"),
    "an empty file": (CSV.touch, "a.csv", "is empty"),
    "a header alone": (rows(), "a.csv", "no rows"),
    "no UTF-8": (lambda: CSV.write_bytes(b"text,label\na b,x\nna\xefve,y\n"), "a.csv", "in line 3"),
    "an open quote": (rows("a b,x", '"c d,y'), "a.csv", "from line 3 on"),
    "a ragged line": (rows("a b,x,", "c d,y", "e f,x", "g h,y"), "a.csv", "line 2 (3 fields, not"),
    "two columns of a name": (rows("a b,x,1", header="text,label,text"), "a.csv", "named text"),
    "an empty text": (rows("a b,x", " ,y", "c d,x", "e f,y"), "a.csv", "line 3 (empty text)"),
    "no label": (rows("a b,x", "c d,", "e f,x", "g h,y"), "a.csv", "line 3 (no label)"),
    "mixed labels": (rows("a b,1", "c d,pos", "e f,1", "g h,pos"), "a.csv", "1 and text such as"),
    "mixed labels in JSON": (
        lambda: json_lines('{"text": "a b", "label": 3}'),
        "a.jsonl",
        "a number (a.jsonl, line 13)",
    ),
    "mixed labels in Parquet": (mixed_parquet, "d", "mixed type, int64 and string"),
    "decimal labels": (
        *(rows("a b,0.5", "c d,1.5", "e f,2", "g h,0.25"), "a.csv", "such as 0.25"),
        {"task": "classification"},
    ),
    "a list of labels": (
        lambda: json_lines('{"text": "a b", "label": ["a"]}'),
        "a.jsonl",
        "line 13 is ['a']",
    ),
    "a label for each row": (rows(*(f"a text,{i}" for i in range(9))), "a.csv", "label of its own"),
    "lists of labels in Parquet": (
        lambda: Dataset.from_dict({"text": ["a b"] * 4, "label": [[1]] * 4}).to_parquet(PARQUET),
        *("a.parquet", "not single values but list", {"task": "classification"}),
    ),
    "no JSON": (lambda: json_lines("{'text': 1}"), "a.jsonl", "line 13 (not JSON)"),
    "half a character": (
        lambda: json_lines('{"text": "a \\uD83D b", "label": "a"}'),
        "a.jsonl",
        "(half a character",
    ),
    "half a character in a label": (
        lambda: json_lines('{"text": "a b", "label": "\\udead"}'),
        "a.jsonl",
        "(half a character",
    ),
    "a number for a text": (
        lambda: json_lines('{"text": 1, "label": "a"}'),
        "a.jsonl",
        "line 13 (text is not text)",
    ),
    "no Parquet": (lambda: PARQUET.write_text("PAR1"), "a.parquet", "cannot be read ("),
    "a column of some tables": (
        lambda: (texts(Path("d/train.csv")), table(Path("d/test.csv"), ["a,b"], "text,klass")),
        *("d", "test.csv has no column label"),
    ),
}


@pytest.fixture(autouse=True)
def limit():
    before = Image.MAX_IMAGE_PIXELS
    yield
    Image.MAX_IMAGE_PIXELS = before


@pytest.mark.parametrize("case", [*USAGE, *BAD])
def test_refused_data_are_one_sentence(case):
    write, name, said, *settings = (USAGE | BAD)[case]
    write()
    with pytest.raises(UsageError if case in USAGE else DataError) as error:
        data.check(Job("vit-micro", name, **dict(*settings))).load()
    assert said in str(error.value)
    assert str(error.value).endswith((".", "?"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["a path upwards", "a link upwards", "an address"])
def test_rows_that_reach_other_files_are_never_skipped(case):
    BAD[case][0]()
    with pytest.raises(DataError, match="paths inside the folder of the table"):
        data.check(Job("vit-micro", "a.csv", skip_bad=True)).load()
