"""Images with captions: tables, COCO's JSON, texts beside images, and sets of the hub."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, Image

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import whole
from razorctl.errors import DataError, UsageError
from tests import local_hub
from tests.own import picture, refused, refuses, sizes, table, written

MODEL, COUNT = "clip-vit-b32", 12
FILES = [f"{n}.png" for n in range(COUNT)]
CAPTIONS = [f"a photo, number {n}" for n in range(COUNT)]


def pictures(folder: str = ".") -> None:
    for number, name in enumerate(FILES):
        picture(Path(folder, name), 9 * number)


def document(file: str, more: object = (), extra: str | None = None) -> None:
    """A JSON file of COCO with two captions of each image."""
    images = [{"id": n, "file_name": name} for n, name in enumerate(FILES)]
    images += [{"id": "x", "file_name": extra}] if extra else []
    captions = [
        {"id": n, "image_id": n % COUNT, "caption": f"{CAPTIONS[n % COUNT]} {n}"}
        for n in range(2 * COUNT)
    ]
    text = json.dumps({"images": images, "annotations": [*captions, *more]})
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


def beside(folder: str, lines: int = 1) -> None:
    pictures(folder)
    for name, caption in zip(FILES, CAPTIONS, strict=True):
        text = "\n\n".join(f"{caption} {line}" for line in range(lines))
        Path(folder, name).with_suffix(".txt").write_text(text)


def imagefolder() -> None:
    pictures("d")
    table(
        Path("d/metadata.csv"),
        [f'{f},"{c}"' for f, c in zip(FILES, CAPTIONS, strict=True)],
        "file_name,caption",
    )


def embedded() -> None:
    pictures()
    images = [{"bytes": Path(name).read_bytes(), "path": None} for name in FILES]
    rows = Dataset.from_dict({"image": images, "caption": CAPTIONS}).cast_column("image", Image())
    rows.to_parquet("d.parquet")


def coco() -> None:
    for split in ("train", "val"):
        pictures(f"d/{split}2017")
        document(f"d/annotations/captions_{split}2017.json")
    instances = {"images": [], "annotations": [{"bbox": [1, 2, 3, 4]}], "categories": []}
    Path("d/annotations/instances_train2017.json").write_text(json.dumps(instances))


def splits_of_texts() -> None:
    beside("d/train", 2)
    beside("d/test")
    Path("d/train/README.txt").write_text("about")


TABLE = {"image": FILES, "caption": CAPTIONS}
# What is written, its name, and the rows to train on, to validate and to test.
CASES = {
    "the convention of imagefolder": (imagefolder, "d", [11, 1, None]),
    "a CSV": (lambda: (pictures(), written(TABLE, "csv", "captions")), "captions.csv", None),
    "JSONL": (lambda: (pictures(), written(TABLE)), "a.jsonl", None),
    "Parquet with images": (embedded, "d.parquet", None),
    "COCO": (coco, "d", [24, 24, None]),
    "one file of COCO": (
        lambda: (pictures("d"), document("d/a.json")),
        "d/a.json",
        [22, 2, None],
    ),
    "texts": (lambda: beside("d"), "d", None),
    "texts of splits": (splits_of_texts, "d", [22, 2, 12]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_found_without_a_task(case):
    write, name, counts = CASES[case]
    write()
    source = data.source_of(Job(MODEL, name))
    assert (source.task, source.modality, source.classes) == ("embedding", "image", 2)
    splits = source.load()
    assert sizes(splits) == (counts or [11, 1, None])
    row = splits.train[0]
    assert row["image"].size == (12, 9)
    assert row["text"].startswith("a photo, number ")
    images = [splits.train.unique("image_id"), splits.evaluated[1].unique("image_id")]
    if splits.record is not None:  # an image is held out with all its captions
        assert not {*images[0]} & {*images[1]}


def test_the_same_image_has_one_number_and_the_digest_has_its_captions():
    pictures()
    picture(Path("again.png"), 0)
    rows = {"image": [*FILES, "again.png"], "caption": [*CAPTIONS, "another"]}
    splits = data.source_of(Job(MODEL, written(rows), validation=0.2)).load()
    ids = {row["text"]: row["image_id"] for part in splits.parts.values() for row in part}
    assert ids["another"] == ids[CAPTIONS[0]] != ids[CAPTIONS[1]]
    rows["caption"][3] = "other"
    changed = data.source_of(Job(MODEL, written(rows), validation=0.2)).load()
    assert changed.digests != splits.digests


def test_a_set_of_the_hub(hub):
    def write(snapshot: Path) -> None:
        embedded()
        Path("d.parquet").rename(snapshot / "train.parquet")

    local_hub.cache(hub, "dataset", "some/set", write)
    assert sizes(data.source_of(Job(MODEL, "hf:some/set")).load()) == [11, 1, None]


def test_what_may_be_captions_is_asked():
    pictures()
    name = written({"image": FILES, "text": CAPTIONS})
    assert "text may be their captions or their classes; give --task embedding" in refused(
        MODEL, name
    )
    assert data.source_of(Job(MODEL, name, task="embedding")).task == "embedding"
    labeled = written({**TABLE, "label": [0, 1] * 6}, name="b")
    assert data.source_of(Job(MODEL, labeled)).task == "classification"
    job = Job(MODEL, labeled, task="embedding", image_column="image", text_column="caption")
    assert data.source_of(job).task == "embedding"


# Columns, or a function that writes data; the model; and a part of the error of usage.
WRONG = {
    "captions for a model of texts": (TABLE, "bert-base", "choose a model of images and texts"),
    "texts alone": ({"title": CAPTIONS, "more": CAPTIONS}, MODEL, "no column of images"),
    "lists of captions": ({"image": FILES, "caption": [CAPTIONS] * COUNT}, MODEL, "a row for each"),
    "no texts": ({"image": FILES, "number": [*range(COUNT)]}, MODEL, "clearly their captions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_columns_that_do_not_suit_the_model(case):
    columns, model, said = WRONG[case]
    pictures()
    assert said in refused(model, written(columns), task="embedding")


def lost_image() -> None:
    beside("d")
    Path("d/3.png").unlink()


def lost_caption() -> None:
    beside("d")
    Path("d/3.txt").unlink()


BAD = {
    "an image without a caption": (lost_caption, r"3\.png \(no caption, in a \.txt file"),
    "a caption without an image": (lost_image, r"3\.txt \(no image of this name\)"),
    "an empty text": (lambda: (beside("d"), Path("d/3.txt").write_text("")), r"3\.txt \(no capt"),
    "an empty cell": (
        lambda: (pictures("d"), written({**TABLE, "caption": [*CAPTIONS[:-1], " "]}, name="d/a")),
        r"a\.jsonl, line 12 \(empty text\)",
    ),
    "no path": (
        lambda: (pictures("d"), written({**TABLE, "image": [*FILES[:-1], ""]}, name="d/a")),
        r"a\.jsonl, line 12 \(no image path\)",
    ),
    "a missing image": (
        lambda: (imagefolder(), Path("d/5.png").unlink()),
        r"metadata\.csv, line 7: .*5\.png \(missing\)",
    ),
    "an annotation of no image": (
        lambda: (pictures("d"), document("d/a.json", [{"id": 99, "image_id": 77, "caption": "a"}])),
        r"a\.json, annotation 24 \(of image 77, which is not in the file\)",
    ),
    "an image without annotations": (
        lambda: (pictures("d"), picture(Path("d/x.png")), document("d/a.json", extra="x.png")),
        r"a\.json, x\.png \(no caption\)",
    ),
    "an image outside": (
        lambda: (pictures("d"), picture(Path("x.png")), document("d/a.json", extra="../x.png")),
        r"outside the folder",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named_and_skipped(case):
    write, said = BAD[case]
    write()
    refuses(DataError, said, MODEL, "d", task="embedding")
    if "outside" not in said:
        splits = data.source_of(Job(MODEL, "d", task="embedding", skip_bad=True)).load()
        assert len(splits.skipped) == 1
        assert re.search(said, splits.skipped[0])


def test_a_damaged_document():
    pictures("d")
    Path("d/a.json").write_text('{"images": [{}], "annotations": [{"caption": "a"}]}')
    refuses(DataError, r"a\.json cannot be read \(KeyError: 'id'\)", MODEL, "d")


@pytest.mark.parametrize(
    ("file", "column", "shown"),
    [("a.jsonl", "caption", "text"), ("a.jsonl", "image", "image"), ("t.txt", None, "text")],
)
def test_what_is_predicted_is_told_by_files_and_columns(file, column, shown):
    pictures()
    written(TABLE)
    Path("t.txt").write_text("a\nb\n")
    option = {} if column is None else {f"{shown}_column": column}
    job = Job(MODEL, "d", task="embedding", **option)
    (part, images), _ = whole.unlabeled([file, "0.png"], job, "image")
    assert part.data.column_names == [shown]
    assert images.data.column_names == ["image"]
    if column is None:
        with pytest.raises(UsageError, match="choose with --image-column or --text-column"):
            whole.unlabeled(["a.jsonl"], job, "image")
