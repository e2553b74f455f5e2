"""Folders and tables of every kind: what `Source` and `Splits` say of them."""

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset
from datasets import Image as ImageColumn
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import images, store, whole
from razorctl.data.own.read import parquet
from razorctl.errors import DataError, UsageError, lacks_memory
from razorctl.models.images import converted
from tests.own import CLASSES, floats, photos, picture, refuses, sizes, table, texts


def load(dataset: str, **settings):
    source = data.source_of(Job("any", dataset, **settings))
    splits = source.load()
    assert len(splits.train) == source.train_examples
    assert len(splits.classes) == source.classes
    last = splits.evaluated[1] if splits.test is None else splits.test
    assert len(last) == source.test_examples
    return splits


LAYOUTS = {
    "direct": (["."], {}, [11, 1, None]),
    "train": (["train"], {}, [11, 1, None]),
    "train and test": (["train", "test"], {}, [11, 1, 12]),
    "train and val": (["train", "val"], {}, [12, 12, None]),
    "all": (["Training", "dev", "Test"], {}, [12, 12, 12]),
    "no validation": (["train", "test"], {"validation": 0.0}, [12, None, 12]),
    "half": (["train", "test"], {"validation": 0.5}, [6, 6, 12]),
    "given": (["one", "two", "three"], {"split": "two,one"}, [12, 12, None]),
    "given without validation": (["one", "two"], {"split": "two,,one"}, [11, 1, 12]),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_folders(case):
    folders, settings, expected = LAYOUTS[case]
    for folder in folders:
        photos(Path("d", folder))
    splits = load("d", **settings)
    assert sizes(splits) == expected
    assert splits.classes == CLASSES
    for row in splits.train:
        # The shade of a picture is that of its class.
        assert round((row["image"].getpixel((0, 0))[0] - 5) / 60) == row["label"]


def test_files_beside_the_images(tmp_path):
    photos(Path("d"))
    for name in (".DS_Store", "Thumbs.db", "notes.txt", "car/1.xml"):
        Path("d", name).touch()
    picture(Path("d/car/deep/er/5.PNG"))
    Path("d/car/9").write_bytes(Path("d/car/0.jpg").read_bytes())  # an image by its contents
    source = data.source_of(Job("any", "d"))
    assert (
        source.details[0]
        == "d: a folder for each class, without its *.txt, *.xml, with all inside it, as car/deep"
    )
    assert source.train_examples + source.test_examples == 14
    assert (tmp_path / "cache" / "razorctl").exists() is False  # nothing was decoded
    source.load()


WRITERS = {
    "csv": lambda rows: table(
        Path("a.csv"), [f'"{text}",{label}' for text, label in zip(*rows, strict=True)]
    ),
    "tsv": lambda rows: table(
        Path("a.tsv"), [f'"{a}"\t{b}' for a, b in zip(*rows, strict=True)], "text\tlabel"
    ),
    "semicolons.csv": lambda rows: table(
        Path("a.semicolons.csv"), [f'"{a}";{b}' for a, b in zip(*rows, strict=True)], "text;label"
    ),
    "jsonl": lambda rows: Path("a.jsonl").write_text(
        "\n\n".join(json.dumps({"label": b, "text": a}) for a, b in zip(*rows, strict=True))
    ),
    "parquet": lambda rows: Dataset.from_dict(
        dict(zip(("text", "label"), rows, strict=True))
    ).to_parquet("a.parquet"),
}
TEXTS = [f"text, {i};\nof two\tlines é" for i in range(8)]
LABELS = {
    "numbers": ([10, 9, 10, 9, 2, 2, 2, 9], ("2", "9", "10")),
    "words": (["b", "a", "b", "a", "B", "B", "a", "a"], ("B", "a", "b")),
}


@pytest.mark.parametrize("small", [True, False], ids=["in memory", "on disk"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("kind", WRITERS)
def test_tables(kind, labels, small, monkeypatch, tmp_path):
    if not small:
        monkeypatch.setattr(store, "SMALL", 0)
    given, classes = LABELS[labels]
    WRITERS[kind]((TEXTS, given))
    splits = load(f"a.{kind}", validation=0.3)
    assert splits.classes == classes
    assert sizes(splits) == [6, 2, None]
    rows = {
        row["text"]: classes[row["label"]]
        for part in (splits.train, splits.validation)
        for row in part
    }
    assert rows == dict(zip(TEXTS, map(str, given), strict=True))
    assert len(list(tmp_path.glob("cache/datasets/razorctl/*.arrow"))) == (not small)
    assert bool(splits.train.cache_files) == (not small)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_is_full_is_no_fault_of_the_data(number, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store, "SMALL", 0)
    monkeypatch.setattr(pa.ipc.RecordBatchStreamWriter, "write_batch", full, raising=False)
    texts(Path("a.csv"))
    said = rf"cannot write .*cache/datasets \({os.strerror(number)}\); make room there, or name"
    with pytest.raises(UsageError, match=said):
        load("a.csv")
    assert not [*tmp_path.rglob("*.arrow")]
    assert not [*tmp_path.rglob(".razorctl-*")]


def test_lines_that_end_as_on_old_macs():
    rows = ["a text,x", '"of two\rlines",y', "", "three four,x", "five six,y", "se ven,x"]
    Path("a.csv").write_bytes("\r".join(["text,label", *rows, ""]).encode())
    splits = load("a.csv", validation=0.2)
    found = [row["text"] for part in (splits.train, splits.validation) for row in part]
    assert sorted(found) == ["a text", "five six", "of two\rlines", "se ven", "three four"]
    lines = [json.dumps({"text": f"a text {i}", "label": i % 2}) for i in range(6)]
    Path("a.jsonl").write_bytes("\r".join([*lines, "{"]).encode())
    with pytest.raises(DataError, match=r"a.jsonl, line 7 \(not JSON\)"):
        load("a.jsonl")


def test_a_large_table_is_read_again_when_it_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "SMALL", 0)
    texts(Path("a.csv"), 12)
    assert sum(sizes(load("a.csv"))[:2]) == 12
    texts(Path("a.csv"), 16)
    assert sum(sizes(load("a.csv"))[:2]) == 16
    assert not list(tmp_path.glob("cache/datasets/razorctl/*.partial"))


def test_classes_of_parquet_have_names():
    rows = Dataset.from_dict({"text": [f"a text {i}" for i in range(8)], "label": [1, 0] * 4})
    kinds = ClassLabel(names=["zebra", "ant"])
    rows.cast_column("label", kinds).to_parquet("a.parquet")
    assert load("a.parquet").classes == ("zebra", "ant")


def test_tables_that_number_their_classes_otherwise_are_refused():
    rows = Dataset.from_dict({"text": [f"a text {i}" for i in range(8)], "label": [1, 0] * 4})
    for split, names in {"train": ["a", "b"], "test": ["b", "a"]}.items():
        rows.cast_column("label", ClassLabel(names=names)).to_parquet(f"d/{split}.parquet")
    refuses(DataError, "the tables of d number their classes differently", "any", "d")


def test_images_in_parquet():
    files = [picture(Path(f"{i}.png"), 9 * i) for i in range(8)]
    rows = {"image": [str(file) for file in files], "label": [0, 1] * 4}
    paths = Dataset.from_dict(rows)
    paths.to_parquet("paths.parquet")
    paths.cast_column("image", ImageColumn()).to_parquet("marked.parquet")
    plain = {"image": [file.read_bytes() for file in files], "label": [0, 1] * 4}
    pandas.DataFrame(plain).to_parquet("bytes.parquet")
    for name in ("paths", "marked", "bytes"):
        splits = load(f"{name}.parquet", validation=0.25)
        shades = {row["image"].getpixel((0, 0))[0] for row in splits.train}
        assert shades < set(range(0, 72, 9))
        assert len(shades) == 6


LONG_TEXTS = {  # columns of texts, and what each row has of them
    "texts": lambda i: {"text": f"text {i} " * 50, "label": "xy"[i % 2]},
    "lists": lambda i: {"text": f"text {i} " * 50, "labels": [["x"], ["y", "x"]][i % 2]},
}


@pytest.mark.parametrize("case", LONG_TEXTS)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_that_are_small_only_as_they_are_compressed_do_not_fill_the_memory(
    kind, case, monkeypatch
):
    """Nor is the text of a column joined, which an array has no more than 2 GB of."""
    rows = [LONG_TEXTS[case](i) for i in range(250)]
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet("a.parquet")
    else:
        Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole = data.source_of(Job("bert-base", f"a.{kind}")).load()
    assert not whole.train.cache_files
    monkeypatch.setattr(store, "IN_MEMORY", 20_000)
    splits = data.source_of(Job("bert-base", f"a.{kind}")).load()
    assert splits.train.cache_files
    assert splits.digests == whole.digests


@pytest.mark.parametrize("after", [1, 3], ids=["of the first rows", "of all rows"])
@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes"),
        pa.ArrowNotImplementedError("Nested data conversions not implemented"),
        OSError("no such page"),
        pa.ArrowMemoryError("malloc of size 3 failed"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_a_parquet_file_that_cannot_be_read_is_named(after, error, monkeypatch):
    """Memory that runs out is no fault of a file."""
    Path("d").mkdir()
    rows = Dataset.from_list([{"text": f"a text {i}", "label": "xy"[i % 2]} for i in range(8)])
    for name in ("train-1", "train-2", "test"):
        rows.to_parquet(f"d/{name}.parquet")
    opened, seen = parquet.TypedFile._open, []

    class Failing:
        def __init__(self, file):
            self.file, self.schema_arrow = file, opened(file).schema_arrow

        def iter_batches(self, most, columns):
            if self.file.path.name == "train-2.parquet" and len(seen) >= after:
                raise error
            seen.append(self.file)
            return opened(self.file).iter_batches(most, columns=columns)

    monkeypatch.setattr(parquet.TypedFile, "_open", lambda file: Failing(file))
    with pytest.raises((DataError, MemoryError, OSError)) as caught:
        data.source_of(Job("any", "d")).load()
    if lacks_memory(error):
        assert caught.value is error
    else:
        assert str(caught.value).startswith(f"d/train-2.parquet cannot be read ({error}); write")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_rows_of_a_large_table_are_stored_for_each_choice_of_columns(ending, monkeypatch):
    monkeypatch.setattr(store, "SMALL", 0)
    texts = {name: [f"{name} of row {row}" for row in range(8)] for name in ("one", "two")}
    rows = Dataset.from_dict({**texts, "label": ["x", "y"] * 4})
    {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}[ending](f"a.{ending}")
    for name in texts:
        job = Job("any", f"a.{ending}", text_column=name, label_column="label")
        assert all(text.startswith(name) for text in data.source_of(job).load().train["text"])


def test_the_last_rows_of_a_large_table_are_checked_too(monkeypatch):
    monkeypatch.setattr(store, "SMALL", 0)
    table(texts(Path("a.csv"), 3000), [f"text {i},x" for i in range(2999)] + [",y"])
    refuses(DataError, r"has 1 bad row: a.csv, line 3001 \(empty text\)", "any", "a.csv")


def test_images_are_decoded_again_only_if_one_changes(monkeypatch):
    photos(Path("d"))
    looked = []
    real = images.image_fault
    monkeypatch.setattr(
        images,
        "image_fault",
        lambda root, image, see: looked.append(image) or real(root, image, see),
    )
    told = []
    job = Job("any", "d")
    data.source_of(job).load(told.append)
    assert told == ["checking images, 0 of 12"]
    data.source_of(job).load()
    assert len(looked) == 12
    Path("d/car/0.jpg").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(DataError, match=r"car/0.jpg \(zero bytes\)"):
            data.source_of(job).load()
    assert len(looked) == 24


OTHER = ("", "[]", "[" * 9999, '{"train": []}', '{"train": {"0": ["", 1]}}', "\udcff")


@pytest.mark.parametrize("other", [*OTHER, "fewer", "of another type"])
def test_what_is_kept_of_images_may_be_anything(other, tmp_path):
    photos(Path("d"))
    first = load("d")
    (kept,) = tmp_path.glob("cache/razorctl/images/*.json")
    said = json.loads(kept.read_text())
    if other == "fewer":
        del said["train"]["3"]
        other = json.dumps(said)
    elif other == "of another type":
        said["train"]["3"][1] = "no number"
        other = json.dumps(said)
    kept.write_bytes(other.encode(errors="surrogateescape"))
    assert load("d").digests == first.digests


def test_images_are_decoded_in_as_many_threads_as_memory_allows(monkeypatch):
    for number in range(12):
        picture(Path("d", "ab"[number % 2], f"{number}.png"), number, (40, 25))
    monkeypatch.setattr(images, "THREADS", 6)
    most, now, real = [], [], PngImageFile.load

    def decoded(image):
        if image.size == (40, 25):
            now.append(1)
            most.append(len(now))
            time.sleep(0.01)
            now.pop()
        return real(image)

    monkeypatch.setattr(PngImageFile, "load", decoded)
    for room, count in ((2 * 4000, 2), (10, 1), (12 * 4000, 6)):
        monkeypatch.setattr(images, "DECODED", images.Room(room))
        most.clear()
        os.utime("d/a/0.png", (room, room))  # so that all are decoded again
        load("d")
        assert max(most) == count


# Mode -> the ending of a format that keeps it, and what its red is after conversion.
MODES = {
    "1": ("png", None),
    "L": ("png", 138),
    "LA": ("png", 138),
    "P": ("png", 90),
    "RGBA": ("png", 90),
    "CMYK": ("jpg", 90),
    "YCbCr": ("tif", 90),
    "I;16": ("png", 40_000 / 257),
    "I": ("tif", 40_000 / 257),
    "F": ("tif", 0.6 * 255),
}


@pytest.mark.parametrize("mode", MODES)
def test_images_of_every_mode_are_good_and_are_converted(mode):
    ending, red = MODES[mode]
    photos(Path("d"), 3)
    file = Path("d/car") / f"x.{ending}"
    if mode in ("I", "I;16", "F"):
        kinds = {"I": np.int32, "I;16": np.uint16, "F": np.float32}
        Image.fromarray(np.full((9, 12), 0.6 if mode == "F" else 40_000, kinds[mode])).save(file)
    else:
        picture(file, 90, mode=mode)
    splits = load("d")
    rows = [row["image"] for part in (splits.train, splits.validation) for row in part]
    (image,) = (image for image in rows if image.mode == mode)
    if red is not None:
        assert converted(image).convert("RGB").getpixel((0, 0))[0] == pytest.approx(red, abs=20)


# Highest values of the images of a set -> the level of white in all of them.
WHITES = {(0.2, 1.0): 1, (0.2, 200.0): 255, (0.9, 200.0, 4000.0): 65535}


@pytest.mark.parametrize("tops", WHITES)
def test_white_is_that_of_the_set(tops):
    for number, top in enumerate(tops):
        for name in "ab":
            floats(Path("d", name, f"{number}.tif"), [0, top])
    splits, level = load("d", validation=0.4), WHITES[tops]
    assert splits.white == level
    shown = {
        converted(row["image"], row["white"]).getpixel((1, 0))
        for part in (splits.train, splits.validation)
        for row in part
    }
    assert shown == {round(255 * top / level) for top in tops}
    # What is predicted is shown as the images of training were, whatever is beside it.
    (part,), _ = whole.unlabeled(["d/a/0.tif"], Job("any", ""), "image", white=level)
    assert part.data[0]["white"] == level
    rows, *_ = whole.labeled(Job("any", "d"), "image", ("a", "b"), white=65535)
    assert set(rows["white"]) == {65535}


def test_a_value_that_is_no_number_blanks_no_image():
    image = Image.fromarray(np.array([[0.5, np.nan, np.inf, -np.inf]], np.float32))
    assert np.asarray(converted(image)).tolist() == [[128, 0, 255, 0]]


def test_what_is_transparent_is_white():
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert converted(image).convert("RGB").getpixel((1, 0)) == (255, 255, 255)
    assert converted(image).convert("RGB").getpixel((0, 0)) == (10, 20, 30)
