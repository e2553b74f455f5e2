"""A user's own data in commands: what is detected, and what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from razorctl.cli.views import common as views
from tests.cli.commands import razorctl
from tests.own import CLASSES, floats, photos, picture, table, texts

QUICK = ["--device", "cpu", "--steps", "2", "--batch-size", "4", "--out", "run"]


LONG = 5000 * "a"
ODD = os.fsdecode(b"n\xff")


def truncate(file: Path, keep: float = 0.6) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def images(*rows: str) -> None:
    """A table of good images and of the given rows."""
    photos(Path())
    good = [f"{name}/{i}.jpg,{name}" for name in CLASSES for i in range(4)]
    table(Path("a.csv"), [*good, *rows], "image,label")


def json_lines(*lines: str) -> None:
    good = [json.dumps({"text": f"a text {i}", "label": "ab"[i % 2]}) for i in range(12)]
    Path("a.jsonl").write_text("\n".join([*good, *lines]))


def mixed_parquet() -> None:
    Dataset.from_dict({"text": ["a b", "c d"], "label": [0, 1]}).to_parquet("d/train.parquet")
    Dataset.from_dict({"text": ["a b", "c d"], "label": ["x", "y"]}).to_parquet("d/test.parquet")


def splits(extra: str = "") -> None:
    for split in ("train", "test"):
        photos(Path("d", split))
    if extra:
        picture(Path("d", "test", extra, "0.jpg"))


def link(target: str) -> None:
    images("linked.jpg,car")
    Path("..", "secret.jpg").write_bytes(Path("car/0.jpg").read_bytes())
    Path("linked.jpg").symlink_to(target)


def address() -> None:
    """A table with the address of an image, which is also the path of a good file."""
    files = [str(picture(Path(f"{i}.png"), 9 * i)) for i in range(7)]
    picture(Path("http:/localhost/a.png"))
    rows = [{"bytes": None, "path": name} for name in (*files, "http://localhost/a.png")]
    Dataset.from_dict({"image": rows, "label": [0, 1] * 4}).to_parquet("a.parquet")


def huge() -> None:
    photos(Path("d"))
    Image.MAX_IMAGE_PIXELS = 200  # which the fixture puts back
    picture(Path("d/car/huge.png"), size=(201, 1))


BAD = {
    # of the name
    "no such thing": (lambda: None, "digit", 2, "(sets of the hub are hf:ORG/NAME); did you mean"),
    "a name of the hub": (
        lambda: None,
        "stanfordnlp/imdb",
        2,
        "stanfordnlp/imdb does not exist; name a file or a folder that does, or write "
        "hf:stanfordnlp/imdb for a set of the hub.",
    ),
    "no such path": (lambda: None, "./digits", 2, "./digits does not exist; name a file"),
    "an archive": (lambda: Path("a.zip").touch(), "a.zip", 5, "a.zip is an archive; unpack it"),
    "another kind": (
        lambda: Path("a.txt").touch(),
        "a.txt",
        2,
        "no table of a known kind; give CSV",
    ),
    "no set of the hub": (lambda: None, "hf:one", 2, "write hf:ORG/NAME:CONFIG"),
    # of folders
    "an empty folder": (lambda: Path("d").mkdir(), "d", 5, "d has no folders with images; give"),
    "an empty class": (
        lambda: (photos(Path("d")), Path("d/van").mkdir()),
        *("d", 5, "1 bad row: van (a class folder without images); correct"),
    ),
    "one class": (lambda: photos(Path("d"), 4, ["car"]), "d", 5, "d are of one class, car; a"),
    "an empty split": (
        lambda: (photos(Path("d/train")), Path("d/test/car").mkdir(parents=True)),
        *("d", 5, "test of d has no rows"),
    ),
    "a class of the test alone": (lambda: splits("van"), "d", 5, "1 class that no training row"),
    "the same split twice": (
        lambda: [photos(Path("d", split)) for split in ("train", "val", "valid")],
        *("d", 2, "the splits val and valid, which are the same; choose with --split"),
    ),
    "an image of no class": (
        lambda: (photos(Path("d")), picture(Path("d/loose.jpg"))),
        *("d", 5, "1 bad row: loose.jpg (in no class folder)"),
    ),
    "an archive among images": (
        lambda: (photos(Path("d")), Path("d/car/more.zip").touch()),
        *("d", 5, "car/more.zip (an archive: unpack it)"),
    ),
    "one row of each class": (lambda: photos(Path("d"), 1), "d", 5, "none can be held out"),
    "a path that is too long": (lambda: None, f"./{LONG}", 2, "a does not exist; name a file"),
    "a name that is too long": (lambda: None, LONG, 2, "are hf:ORG/NAME); known"),
    "an image whose name is not UTF-8": (
        lambda: (photos(Path("d")), Path("d/car/0.jpg").rename(Path("d/car", f"{ODD}.jpg"))),
        *("d", 5, "1 bad row: car/n?.jpg (its name is not UTF-8: rename it)"),
    ),
    "a class whose name is not UTF-8": (
        lambda: (photos(Path("d")), picture(Path("d", ODD, "0.jpg"))),
        *("d", 5, "1 bad row: n?/0.jpg (its name is not UTF-8: rename it)"),
    ),
    "a folder whose name is not UTF-8": (lambda: photos(Path(ODD)), ODD, 5, "n?: its name is not"),
    "a table whose name is not UTF-8": (
        lambda: (texts(Path("d/train.csv")), texts(Path("d", f"{ODD}.csv"))),
        *("d", 5, "d/n?.csv: its name is not UTF-8"),
    ),
    "images with masks": (
        lambda: [picture(Path("d", part, "0.png")) for part in ("images", "masks")],
        *("d", 2, "segmentation, and vit-micro is not; choose one of vit-b16, vit-l16,"),
    ),
    "boxes": (
        lambda: (picture(Path("d/train/0.png")), Path("d/train/0.txt").write_text("0 .1 .2 .3 .4")),
        *("d", 2, "d has boxes of objects (YOLO), by train/0.txt, which razorctl has no task for"),
    ),
    "preference pairs": (
        lambda: table(Path("a.csv"), ["a b,c d,e f"], "prompt,chosen,rejected"),
        *("a.csv", 2, "(preference pairs, DPO), by its columns chosen, rejected, which razorctl"),
    ),
    "a JSON document": (
        lambda: Path("a.json").write_text('{"rows": 1}'),
        *("a.json", 2, "a.json is one JSON document, not a list; write"),
    ),
    # of images
    "zero bytes": (
        lambda: (photos(Path("d")), Path("d/car/0.jpg").write_bytes(b"")),
        *("d", 5, "1 bad row: car/0.jpg (zero bytes)"),
    ),
    "a truncated JPEG": (
        lambda: (photos(Path("d")), truncate(Path("d/car/0.jpg"), 0.99)),
        *("d", 5, "car/0.jpg (truncated)"),
    ),
    "a truncated PNG": (
        lambda: (photos(Path("d")), truncate(picture(Path("d/car/0.png"), size=(90, 90)))),
        *("d", 5, "car/0.png (truncated)"),
    ),
    "another file": (
        lambda: (photos(Path("d")), Path("d/car/0.jpg").write_text("hello")),
        *("d", 5, "car/0.jpg (no image of a known format: save it as PNG)"),
    ),
    "a damaged image": (
        lambda: (photos(Path("d")), damage(picture(Path("d/car/0.png"), size=(90, 90)))),
        *("d", 5, "car/0.png (damaged: broken"),
    ),
    "a huge image": (huge, "d", 5, "car/huge.png (201 x 1 pixels, more than PIL's limit of 200)"),
    "a dead link": (
        lambda: (photos(Path("d")), Path("d/car/x.jpg").symlink_to("nothing")),
        *("d", 5, "car/x.jpg (missing)"),
    ),
    "pixels that are no numbers": (
        lambda: (photos(Path("d")), floats(Path("d/car/0.tif"), [0.5, math.nan, math.inf])),
        *("d", 5, "car/0.tif (2 of its pixels are NaN or infinite)"),
    ),
    # of images in tables
    "a missing image": (lambda: images("none.jpg,car"), "a.csv", 5, "here/none.jpg (missing)"),
    "an image path that is too long": (
        lambda: images(f"{LONG}.jpg,car"),
        *("a.csv", 5, "line 14 (File name too long)"),
    ),
    "no image path": (lambda: images(",car"), "a.csv", 5, "a.csv, line 14 (no image path)"),
    "a path upwards": (
        lambda: images("../a.jpg,car"),
        "a.csv",
        5,
        "line 14 (outside the folder of",
    ),
    "an absolute path": (
        lambda: images("/etc/a.jpg,car"),
        "a.csv",
        5,
        "(outside the folder of its",
    ),
    "an address": (
        lambda: images("https://example.org/a.jpg,car"),
        *("a.csv", 5, "line 14 (an address, not the path of a file); name images by paths"),
    ),
    "an address as Parquet has it": (
        address,
        *("a.parquet", 5, "a.parquet, row 7 (an address, not the path of a file); name images by"),
    ),
    "a link upwards": (lambda: link("../secret.jpg"), "a.csv", 5, "line 14 (outside the folder of"),
    "a member of an archive": (
        lambda: images("more.zip/a.jpg,car"),
        *("a.csv", 5, "line 14 (inside an archive: unpack it)"),
    ),
    # of tables
    "an empty file": (lambda: Path("a.csv").touch(), "a.csv", 5, "a.csv is empty; give"),
    "a header alone": (
        lambda: table(Path("a.csv"), []),
        "a.csv",
        5,
        "has no rows that can be read",
    ),
    "no UTF-8": (
        lambda: Path("a.csv").write_bytes(b"text,label\na b,x\nna\xefve,y\n"),
        *("a.csv", 5, "a.csv is not UTF-8 in line 3"),
    ),
    "an open quote": (
        lambda: table(Path("a.csv"), ["a b,x", '"c d,y']),
        *("a.csv", 5, "cannot be read from line 3 on (unexpected end of data)"),
    ),
    "a ragged line": (
        lambda: table(texts(Path("a.csv")), ["a b,x,", "c d,y", "e f,x", "g h,y"]),
        *("a.csv", 5, "1 bad row: a.csv, line 2 (3 fields, not 2)"),
    ),
    "two columns of a name": (
        lambda: table(Path("a.csv"), ["a b,x,1"], "text,label,text"),
        *("a.csv", 5, "two columns named text"),
    ),
    "an empty text": (
        lambda: table(Path("a.csv"), ["a b,x", " ,y", "c d,x", "e f,y"]),
        *("a.csv", 5, "1 bad row: a.csv, line 3 (empty text)"),
    ),
    "no label": (
        lambda: table(Path("a.csv"), ["a b,x", "c d,", "e f,x", "g h,y"]),
        *("a.csv", 5, "1 bad row: a.csv, line 3 (no label)"),
    ),
    "labels of mixed type": (
        lambda: table(Path("a.csv"), ["a b,1", "c d,pos", "e f,1", "g h,pos"]),
        *("a.csv", 5, "mixed type, numbers such as 1 and text such as 'pos'"),
    ),
    "labels of mixed type in JSON": (
        lambda: json_lines('{"text": "a b", "label": 3}'),
        *("a.jsonl", 5, "text (a.jsonl, line 1) and a number (a.jsonl, line 13)"),
    ),
    "labels of mixed type in Parquet": (mixed_parquet, "d", 5, "mixed type, int64 and string"),
    "decimal labels": (
        lambda: table(Path("a.csv"), ["a b,0.5", "c d,1.5", "e f,2", "g h,0.25"]),
        *("a.csv --task classification", 5, "decimal numbers, such as 0.25"),
    ),
    "a list of labels": (
        lambda: json_lines('{"text": "a b", "label": ["a"]}'),
        *("a.jsonl", 5, "the label at a.jsonl, line 13 is ['a']"),
    ),
    "a label for each row": (
        lambda: table(Path("a.csv"), [f"a text,{i}" for i in range(9)]),
        *("a.csv", 5, "each training row of a.csv has a label of its own"),
    ),
    "lists of labels in Parquet": (
        lambda: Dataset.from_dict({"text": ["a b"] * 4, "label": [[1]] * 4}).to_parquet(
            "a.parquet"
        ),
        *(
            "a.parquet --task classification",
            5,
            "labels of a.parquet are no single values but list",
        ),
    ),
    "no JSON": (lambda: json_lines("{'text': 1}"), "a.jsonl", 5, "a.jsonl, line 13 (not JSON)"),
    "half a character": (
        lambda: json_lines('{"text": "a \\uD83D b", "label": "a"}'),
        *("a.jsonl", 5, "a.jsonl, line 13 (half a character: a lone surrogate)"),
    ),
    "half a character in a label": (
        lambda: json_lines('{"text": "a b", "label": "\\udead"}'),
        *("a.jsonl", 5, "a.jsonl, line 13 (half a character: a lone surrogate)"),
    ),
    "a number for a text": (
        lambda: json_lines('{"text": 1, "label": "a"}'),
        *("a.jsonl", 5, "a.jsonl, line 13 (text is no text)"),
    ),
    "no Parquet": (
        lambda: Path("a.parquet").write_text("PAR1"),
        "a.parquet",
        5,
        "cannot be read (",
    ),
    "a column of some tables": (
        lambda: (texts(Path("d/train.csv")), table(Path("d/test.csv"), ["a,b"], "text,klass")),
        *("d", 5, "test.csv has no column label, only text, klass"),
    ),
    "tables of several kinds": (
        lambda: (texts(Path("d/train.csv")), texts(Path("d/test.tsv"))),
        *("d", 2, "tables of several kinds, .csv, .tsv"),
    ),
    # of what is asked for
    "no such column": (
        lambda: texts(Path("a.csv")),
        "a.csv --label-column y",
        2,
        "no column y, only",
    ),
    "two labels": (
        lambda: table(Path("a.csv"), ["a b,x,y"] * 4, "text,label,class"),
        *(
            "a.csv",
            2,
            "may be the label, label, class, of text, label, class; choose with --label-c",
        ),
    ),
    "no text": (
        lambda: table(Path("a.csv"), ["1,x", "2,y"], "number,label"),
        *("a.csv", 2, "none of the columns of a.csv is clearly an image or a text: number, label"),
    ),
    "a column used twice": (
        lambda: texts(Path("a.csv")),
        *("a.csv --label-column text --text-column text", 2, "column text of a.csv cannot be used"),
    ),
    "splits of one file": (lambda: texts(Path("a.csv")), "a.csv --split a,b", 2, "has no splits"),
    "no such split": (splits, "d --split train,dev", 2, "d has no split dev, only test, train"),
    "validation twice": (
        lambda: [photos(Path("d", split)) for split in ("train", "val")],
        *("d --validation 0.2", 2, "d has a validation split, so nothing is held out"),
    ),
    "nothing to evaluate on": (
        lambda: photos(Path("d")),
        "d --validation 0",
        2,
        "give --validation",
    ),
    "a share of all": (lambda: photos(Path("d")), "d --validation 1", 2, "outside [0, 1)"),
    "columns of a registered set": (
        lambda: None,
        "digits --label-column y",
        2,
        "digits has its own",
    ),
    "images and texts": (
        lambda: None,
        *("d --image-column a --text-column b", 2, "give an image or a text column"),
    ),
    "texts for images": (
        lambda: texts(Path("a.csv")),
        "a.csv",
        2,
        "vit-micro takes images, and a.csv",
    ),
    "a batch of more": (lambda: photos(Path("d")), "d --batch-size 12", 2, "than the 11 training"),
}


@pytest.fixture
def limit():
    before = Image.MAX_IMAGE_PIXELS
    yield
    Image.MAX_IMAGE_PIXELS = before


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_one_sentence_and_the_exit_code(case, tmp_path, monkeypatch, limit):
    write, words, code, sentence = BAD[case]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir("here")
    write()
    result = razorctl("finetune", "vit-micro", *QUICK, *words.split())
    assert result.exit_code == code, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last
    assert not Path("run").exists()


def test_bad_rows_of_one_cause_are_one_sentence():
    photos(Path("d"), 8)
    for i in range(7):
        Path(f"d/car/{i}.jpg").write_bytes(b"")
    result = razorctl("finetune", "vit-micro", "d", *QUICK)
    assert result.exit_code == 5
    *_, sentence = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert sentence == (
        "error: d has 7 bad rows: car/0.jpg, car/1.jpg, car/2.jpg, car/3.jpg, car/4.jpg and 2 more "
        "(zero bytes); correct them, or leave them out with --skip-bad, which leaves 17 rows."
    )
    assert result.stderr.endswith(f"{sentence}\n")


BEFORE_DATA = {
    "a method": ["finetune", "--method", "raz"],
    "an attention": ["finetune", "--attention", "flush"],
    "a card": ["finetune", "--gpu", "rtx-1"],
    "a metric of another task": ["finetune", "--task", "regression", "--metric", "f1"],
    "a directory that is there": ["finetune", "--out", "."],
    "a card to plan for": ["plan", "--gpu", "rtx-1"],
    "methods to compare": ["compare", "--methods", "full,raz"],
    "a directory for a comparison": ["compare", "--out", "."],
}


@pytest.mark.parametrize("case", BEFORE_DATA)
def test_names_are_checked_before_data_are_read(case):
    command, *words = BEFORE_DATA[case]
    result = razorctl(command, "vit-micro", "./none.csv", *words)
    assert result.exit_code == 2
    assert "none.csv" not in result.stderr
    assert words[-1].split(",")[-1] in result.stderr


@pytest.mark.parametrize("case", ["a path upwards", "a link upwards", "an address"])
def test_rows_that_reach_other_files_are_never_skipped(case, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir("here")
    BAD[case][0]()
    result = razorctl("finetune", "vit-micro", "a.csv", *QUICK, "--skip-bad")
    assert result.exit_code == 5
    assert "name images by paths inside the folder of the table" in result.stderr


def test_bad_rows_are_left_out_with_one_note():
    photos(Path("d"))
    truncate(Path("d/bus/1.jpg"))
    Path("d/van").mkdir()
    args = ["--validation", "0.25", "--skip-bad", "--json", "--evaluate-every", "2"]
    result = razorctl("finetune", "vit-micro", "d", *QUICK, *args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[:4] == [
        "reading d ...",
        "d: a folder for each class",
        "3 classes: bus, car, tram",
        "8 rows to train on, 3 held out for validation",
    ]
    assert (
        "note: 2 bad rows are left out; run/split.json has their numbers:\n"
        "  van (a class folder without images)\n  bus/1.jpg ("
    ) in result.stderr
    document = json.loads(result.stdout)
    assert document["split"] == "validation"
    assert "validation_accuracy" not in document
    assert document["job"]["skip_bad"] is True
    record = json.loads(Path("run/split.json").read_text())
    assert record["skipped"] == {"d": [1]}
    assert (record["validation"], record["seed"], len(record["rows"])) == (0.25, 0, 3)


@pytest.mark.parametrize("command", ["finetune", "evaluate", "predict"])
def test_the_first_of_many_bad_rows_are_named(command, tmp_path):
    photos(Path("d"), 20)
    trained = ["--validation", "0.25", "--skip-bad", "--evaluate-every", "2"]
    if command != "finetune":
        assert razorctl("finetune", "vit-micro", "d", *QUICK, *trained).exit_code == 0
    for i in range(13):
        Path(f"d/car/{i}.jpg").write_bytes(b"")
    words = ["finetune", "vit-micro", "d", *QUICK, *trained]
    if command != "finetune":
        words = [command, "run", "d", "--device", "cpu", "--skip-bad"]
    result = razorctl(*words)
    assert result.exit_code == 0, result.stderr
    said = result.stderr.splitlines()
    at = next(i for i, line in enumerate(said) if line.startswith("note: 13 bad rows are left out"))
    named = sorted(f"car/{i}.jpg" for i in range(13))[:10]
    assert [line.split()[0].removeprefix("d/") for line in said[at + 1 : at + 11]] == named
    assert said[at + 11] == "  and 3 more"


def test_the_test_split_is_evaluated_once_at_the_end():
    for split in ("train", "val", "test"):
        photos(Path("d", split))
    result = razorctl("finetune", "vit-micro", "./d", *QUICK, "--evaluate-every", "1")
    assert result.exit_code == 0, result.stderr
    assert "12 rows to train on, 12 for validation, 12 for test" in result.stderr
    assert "validation accuracy" in result.stdout
    assert "test accuracy" in result.stdout
    document = json.loads(Path("run/result.json").read_text())
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert document["split"] == "test"
    assert document["validation_loss"] == last["test_loss"]
    assert document["validation_accuracy"] == last["accuracy"]
    # The images are the same, and the last weights are those of the last evaluation.
    assert document["loss"] == pytest.approx(document["validation_loss"])
    record = json.loads(Path("run/split.json").read_text())
    assert (record.keys(), record["digests"].keys()) == (
        {"digests"},
        {"train", "validation", "test"},
    )


def test_a_run_on_ones_own_data_can_be_repeated():
    images()
    args = ["a.csv", "--label-column", "label", "--validation", "0.3", "--seed", "4"]
    assert razorctl("finetune", "vit-micro", *args, *QUICK).exit_code == 0
    again = razorctl("--config", "run/config.toml", "finetune", "--out", "again", "--device", "cpu")
    assert again.exit_code == 0, again.stderr
    assert Path("run/split.json").read_text() == Path("again/split.json").read_text()
    weights = [Path(run, "model.safetensors").read_bytes() for run in ("run", "again")]
    assert weights[0] == weights[1]


def test_plan_and_compare_take_ones_own_data(runs_here):
    photos(Path("d"))
    result = razorctl("plan", "vit-micro", "d", "--batch-size", "4", "--gpu", "t4", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["steps_per_epoch"] == 2
    assert "razorctl finetune vit-micro d " in document["command"]
    args = ["--batch-size", "4", "--steps", "1", "--device", "cpu", "--methods", "full"]
    result = razorctl("compare", "vit-micro", "d", *args, "--validation", "0.5", "--json")
    assert result.exit_code == 0, result.stderr
    assert "6 rows to train on, 6 held out" in result.stderr
    assert json.loads(result.stdout)["rows"][0]["accuracy"] is not None


def test_ones_own_data_are_settled_without_torch():
    photos(Path("d"))
    texts(Path("a.csv"))
    code = (
        "import sys; from razorctl.cli.app import app\n"
        "for words in ('finetune vit-micro d --batch-size 99', 'plan bert-base a.csv --gpu t5'):\n"
        "    try: app(words.split())\n"
        "    except SystemExit as stop: assert stop.code == 2\n"
        "    assert not {'torch', 'timm', 'transformers'} & set(sys.modules), words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_directory_is_named_by_the_last_part_of_a_path():
    photos(Path("some/where"))
    args = ["--device", "cpu", "--steps", "1", "--batch-size", "4"]
    assert (
        razorctl("finetune", "vit-micro", str(Path("some/where").resolve()), *args).exit_code == 0
    )
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("vit-micro-where-razor-")


def test_paths_in_titles_are_relative_inside_the_working_directory():
    below, beside = Path.cwd() / "d" / "e", Path.cwd().parent / "f"
    shown = [views.title("vit-micro", str(name)) for name in (below, beside, "digits")]
    assert shown == ["vit-micro on ./d/e", f"vit-micro on {beside}", "vit-micro on digits"]
    assert views.title(str(below), str(below)) == "./d/e on ./d/e"


def test_registered_names_win_unless_a_separator_is_typed():
    photos(Path("digits"))
    words = ["plan", "vit-micro", "--gpu", "t4", "--batch-size", "4", "--max-ratio", "0.5"]
    assert "classes" not in razorctl(*words, "digits").stderr
    assert "3 classes: bus, car, tram" in razorctl(*words, f".{os.sep}digits").stderr
