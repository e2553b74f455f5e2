"""Boxes of objects in columns of tables and of sets of the hub, and the format of their numbers."""

import json
import random
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from razorctl import data
from razorctl.config.job import Job
from razorctl.errors import DataError, UsageError
from tests import local_hub
from tests.own import coco, photos, picture, refuses, sizes, texts

SIZE = (60, 40)
FORMATS = {
    "xywh": lambda left, top, right, bottom: [left, top, right - left, bottom - top],
    "xyxy": lambda *box: [*box],
    "cxcywh": lambda left, top, right, bottom: [
        *((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
    ],
}
SHARES = (*SIZE, *SIZE)


def corners(count=30, most=1.0):
    """Boxes of some size anywhere in an image, two in each; most: the largest share of its side."""
    draw, boxes = random.Random(0), []
    for _ in range(2 * count):
        low, high = [], []
        for side in SIZE:
            length = draw.randint(4, int(most * side))
            low.append(draw.randint(0, side - length))
            high.append(low[-1] + length)
        boxes.append([*low, *high])
    return [boxes[2 * row : 2 * row + 2] for row in range(count)]


def objects(written, count=30, shares=False, **more):
    """The values of a column: struct of lists."""
    rows = []
    for row, two in enumerate(corners(count, **more)):
        boxes = [FORMATS[written](*box) for box in two]
        if shares:
            boxes = [[x / side for x, side in zip(box, SHARES, strict=True)] for box in boxes]
        rows.append({"bbox": boxes, "category": ["ab"[row % 2], "b"], "area": [1, 2]})
    return rows


def lines(name, column, images="{}.png"):
    """A table of images, with a column `objects`."""
    for row in range(len(column)):
        picture(Path(name).parent / images.format(row), 5 * row, SIZE)
    rows = ({"file_name": images.format(row), "objects": of} for row, of in enumerate(column))
    Path(name).write_text("\n".join(map(json.dumps, rows)))


def load(name="a.jsonl", **settings):
    return data.source_of(Job("any", name, task="detection", **settings)).load()


def bad(said, name="a.jsonl", error=DataError, **settings):
    refuses(error, said, "any", name, task="detection", **settings)


def fits(splits):
    """Whether the training rows have the boxes of `corners`."""
    expected = corners(len(splits.train) + len(splits.validation))
    kept = [row for row in range(len(expected)) if row not in splits.record["rows"]]
    for row, number in enumerate(kept):
        for box, other in zip(splits.train[row]["boxes"], expected[number], strict=True):
            assert box == pytest.approx(other)
    return True


@pytest.mark.parametrize("shares", [False, True], ids=["pixels", "shares"])
@pytest.mark.parametrize("written", FORMATS)
def test_the_format_that_fits(written, shares):
    lines("a.jsonl", objects(written, shares=shares))
    captions = Path("a.jsonl").read_text().replace('"objects"', '"caption": "a cat", "objects"')
    Path("a.jsonl").write_text(captions)
    splits = load()
    assert fits(splits)
    assert splits.classes == ("a", "b")
    noted = written != "xywh" or shares
    assert any("which fits their images" in note for note in splits.notes) == noted
    assert any("as shares of width and height" in note for note in splits.notes) == shares


def test_a_format_that_is_said():
    lines("a.jsonl", objects("cxcywh"))
    bad("a right or bottom side before", box_format="xyxy")
    lines("b.jsonl", objects("cxcywh", shares=True))
    assert fits(load("b.jsonl", box_format="cxcywh"))
    small = [{"bbox": [[1, 2, 30, 20]], "category": ["a"]}] * 9  # a corner, or a size
    lines("c.jsonl", small)
    bad(
        "not clear: of 9 boxes, .* 0 with xywh .left, top, width and height., 0 with xyxy ",
        "c.jsonl",
    )
    assert load("c.jsonl", box_format="xyxy").train[0]["boxes"] == [[1.0, 2.0, 30.0, 20.0]]
    with pytest.raises(UsageError, match="box_format 'xyhw'"):
        load(box_format="xyhw")
    coco("d")
    bad(
        "d says the format of its boxes; leave --box-format out", "d", UsageError, box_format="xywh"
    )
    texts(Path("t.csv"))
    refuses(UsageError, "t.csv has no boxes; leave", "bert-base", "t.csv", box_format="xywh")


def test_shares_and_pixels_in_one_set():
    mixed = [*objects("xywh", shares=True), *objects("xywh", 20)]
    lines("a.jsonl", mixed)
    for said in (None, "xywh"):
        bad("60 of 100 boxes in a.jsonl end within one pixel, as if they w", box_format=said)
    Path("d").mkdir()
    lines("d/train.jsonl", objects("xywh"))
    lines("d/val.jsonl", objects("xywh", 20, shares=True))
    bad("40 of 100 boxes in d end within one pixel", "d")
    rounded = objects("xyxy", shares=True)
    rounded[3]["bbox"][1] = [0.4, 0.4, 1.004, 0.9]
    lines("a.jsonl", rounded)
    ends = [box[2:] for row in load(validation=0.05, seed=1).train for box in row["boxes"]]
    assert [60.0, 36.0] in ends  # cut at the border


def test_a_few_boxes_beyond_their_images_are_bad_rows():
    column = objects("xywh", 60)
    column[7]["bbox"][1] = [40, 10, 40, 10]
    lines("a.jsonl", column)
    bad(r"1 bad row: a.jsonl, line 8 \(box 2: a box from 40, 10 to 80, 20, outside of 60 x 40")
    assert len(load(skip_bad=True).train) == 53


FORMS = {
    "lists of structs": lambda of: [
        {"bbox": box, "category_id": "ab".index(name)}
        for box, name in zip(of["bbox"], of["category"], strict=True)
    ],
    "other names": lambda of: {
        "boxes": [[float(x) for x in box] for box in of["bbox"]],
        "label": [float("ab".index(name)) for name in of["category"]],
        "id": [3, 4],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_columns(form):
    lines("a.jsonl", [FORMS[form](of) for of in objects("xywh")])
    splits = load()
    assert fits(splits)
    assert splits.classes == ("0", "1")


ODD = {
    "fewer classes": ({"bbox": [[1, 2, 3, 4]], "category": []}, "1 box and 0 classes"),
    "no class": ([{"bbox": [1, 2, 3, 4]}], "box 1: no class"),
    "three numbers": ([{"bbox": [1, 2, 3], "category": 1}], "box 1: no box of four numbers"),
    "a text": ("none", "the objects 'none' has no boxes"),
    "not finite": ({"bbox": [[1, None, 3, 4]], "category": ["a"]}, "box 1: a box that is not fin"),
    "a list in a list": ([[1, 2, 3, 4]], "box 1: no box of four numbers"),
}


@pytest.mark.parametrize("case", ODD)
def test_bad_rows(case):
    value, said = ODD[case]
    lines("a.jsonl", [*objects("xywh"), value])
    bad(rf"1 bad row: a.jsonl, line 31 \({said}")


def test_rows_without_objects():
    lines("a.jsonl", [*objects("xywh"), None, [], {"bbox": [], "category": []}])
    splits = load(validation=0.05, seed=1)
    assert [row["label"] for row in splits.train][-2:] == [[], []]
    assert splits.notes == ("3 of 31 training images without boxes.",)


def typed(count=30):
    """A table of `datasets` with names of classes, as of cppe-5."""
    rows = [
        {"image": Pictures.new("RGB", SIZE, (row, 9, 9)), "width": 60, "objects": of}
        for row, of in enumerate(objects("xywh", count))
    ]
    each = {"bbox": List(Value("float32")), "category": ClassLabel(names=["b", "a", "c"])}
    each["area"] = Value("int64")
    types = {"image": Image(), "width": Value("int64")}
    types["objects"] = {name: List(kind) for name, kind in each.items()}
    return Dataset.from_list(rows, features=Features(types))


def test_typed_files():
    typed().to_parquet("a.parquet")
    splits = load("a.parquet")
    assert fits(splits)
    assert splits.classes == ("b", "a", "c")
    assert splits.train[0]["label"] in ([1, 0], [0, 0])
    typed().save_to_disk("saved")
    assert fits(load("saved"))


@pytest.mark.parametrize("kind", ["parquet", "imagefolder"])
def test_sets_of_the_hub(kind, hub):
    def write(snapshot):
        if kind == "parquet":
            typed().to_parquet(snapshot / "train.parquet")
        else:
            (snapshot / "train").mkdir()
            lines(snapshot / "train" / "metadata.jsonl", objects("xywh"))

    local_hub.cache(hub, "dataset", "some/set", write)
    source = data.source_of(Job("any", "hf:some/set", task="detection"))
    assert ": image in " in source.details[0]
    assert source.details[1].startswith(
        "3 classes" if kind == "parquet" else "2 classes of objects in 60 boxes"
    )
    assert fits(source.load())
    refuses(UsageError, "boxes of objects, which are for detection", "bert-base", "hf:some/set")


def test_folders_of_images_with_metadata():
    for split in ("train", "test"):
        Path("d", split).mkdir(parents=True)
        lines(f"d/{split}/metadata.jsonl", objects("xywh"), "sub/{}.png")
    assert sizes(load("d")) == [27, 3, 30]


def test_tables_that_other_models_refuse():
    lines("a.jsonl", objects("xywh"))
    said = "a.jsonl has images with boxes of objects, which are for detection, and vit-micro is not"
    refuses(UsageError, said, "vit-micro", "a.jsonl")
    lines("b.jsonl", [{"bbox": of["bbox"]} for of in objects("xywh")])
    bad("b.jsonl has boxes in objects without a class; give each a category", "b.jsonl", UsageError)
    photos(Path())
    rows = [{"image": f"car/{i}.jpg", "bbox": [[1, 2, 3, 4]]} for i in range(4)]
    Path("c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bad("boxes of objects in images .* by its columns image, bbox, which", "c.jsonl", UsageError)
