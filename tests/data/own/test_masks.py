"""Images with masks of one's own, and what a model is fed of them."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from razorctl import data
from razorctl.config.job import Job
from razorctl.errors import DataError, UsageError
from razorctl.models import masks
from tests.own import picture, sizes, table

SIZE = (12, 9)
job = partial(Job, "any", task="segmentation")


def mask(file, *values, size=SIZE, mode="L"):
    """A mask whose columns have these values in turn."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    row = np.resize(values or (0, 1, 2, 255), size[0])
    pixels = np.tile(row, (size[1], 1))
    if mode in ("1", "P"):
        image = Image.fromarray(pixels.astype(np.uint8)).convert("L")
        image = image.point(lambda v: 255 * v, "1") if mode == "1" else image
        if mode == "P":
            image.putpalette([200, 10, 10] * 256)
    else:
        image = Image.fromarray(pixels.astype(np.uint16 if mode == "I;16" else np.uint8))
        image = image.convert(mode) if mode == "RGB" else image
    image.save(file)
    return Path(file)


def pairs(folder="d", count=6, split="", of_masks="masks", swapped=False):
    for i in range(count):
        parts = [("images", of_masks)[kind] for kind in (0, 1)]
        image, own = (
            Path(folder, split, part) if not swapped else Path(folder, part, split)
            for part in parts
        )
        picture(image / f"{i}.jpg", 9 * i)
        mask(own / f"{i}.png")


def load(name="d", **settings):
    source = data.source_of(job(name, **settings))
    splits = source.load()
    assert (source.task, source.modality) == ("segmentation", "image")
    assert source.classes == len(splits.classes)
    assert source.train_examples == len(splits.train)
    return splits


LAYOUTS = {
    "one": ([""], {}, [5, 1, None]),
    "annotations": ([""], {"of_masks": "annotations"}, [5, 1, None]),
    "as of VOC": ([""], {"of_masks": "SegmentationClass"}, [5, 1, None]),
    "splits": (["train", "val", "test"], {}, [6, 6, 6]),
    "splits inside": (["training", "validation"], {"swapped": True}, [6, 6, None]),
    "labels inside": (["train", "test"], {"swapped": True, "of_masks": "labels"}, [5, 1, 6]),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_folders(case):
    folders, settings, expected = LAYOUTS[case]
    for split in folders:
        pairs(split=split, **settings)
    splits = load()
    assert sizes(splits) == expected
    assert splits.classes == ("0", "1", "2")
    for row in splits.train:
        assert row.keys() == {"image", "mask"}
        assert row["image"].size == row["mask"].size == SIZE
        assert row["mask"].getextrema() == (0, 255)


def test_pairs_are_named_alike():
    pairs()
    mask("d/masks/0.png", 1, 0)
    mask("d/masks/5.png", 0, 3)
    rows = list(load(validation=0.2).train)
    for row in rows:
        shade = row["image"].getpixel((0, 0))[0]
        highest = sorted(set(row["mask"].tobytes()))
        expected = {0: [0, 1], 5: [0, 3]}.get(round(shade / 9), [0, 1, 2, 255])
        assert highest == expected


@pytest.mark.parametrize("mode", ["L", "P", "1", "I;16"])
def test_masks_of_every_mode(mode):
    values = [0, 1] if mode == "1" else [0, 1, 2, 255]
    pairs()
    for i in range(6):
        mask(f"d/masks/{i}.png", *values, mode=mode)
    splits = load()
    assert splits.classes == tuple(map(str, [v for v in values if v != 255]))
    row = splits.train[0]
    assert row["mask"].mode == mode
    found = masks.mask_labels(row["mask"])
    assert found.shape == (9, 12)
    assert found[0].tolist() == [-100 if v == 255 else v for v in values * (12 // len(values))]


NAMES = {
    "classes.txt": "sky\n road \ncar\ntree\n",
    "id2label.json": json.dumps({"0": "sky", "2": "car", "1": "road", "3": "tree"}),
}


@pytest.mark.parametrize("file", NAMES)
@pytest.mark.parametrize("kind", ["folder", "table"])
def test_names_of_classes(file, kind):
    pairs()
    Path("d", file).write_text(NAMES[file])
    if kind == "table":
        table(Path("d/a.csv"), [f"images/{i}.jpg,masks/{i}.png" for i in range(6)], "image,mask")
    splits = load("d" if kind == "folder" else "d/a.csv")
    assert splits.classes == ("sky", "road", "car", "tree")
    Path("d", file).write_text('["sky"]' if file.endswith("json") else "sky\nsky\n")
    with pytest.raises(DataError, match=f"{file} does not name .*; give classes.txt with a name"):
        load("d" if kind == "folder" else "d/a.csv")


def test_columns_that_are_given():
    pairs(".")
    table(Path("a.csv"), [f"images/{i}.jpg,masks/{i}.png,{i % 2}" for i in range(6)], "x,y,label")
    assert sizes(load("a.csv", image_column="x", label_column="y")) == [5, 1, None]
    assert data.source_of(Job("any", "a.csv", image_column="x")).task == "classification"
    with pytest.raises(UsageError, match=r"no images with masks.* only the columns x, y, label"):
        data.source_of(job("a.csv"))


BAD = {
    "another size": (lambda: mask("d/masks/3.png", size=(9, 12)), "9 x 12 pixels, and its image 1"),
    "RGB": (lambda: mask("d/masks/3.png", mode="RGB"), "of colors: save one channel whose values"),
    "a JPEG": (
        lambda: (
            mask("d/masks/3.png").rename("d/x.png")
            and Image.open("d/x.png").save("d/masks/3.png", "JPEG")
        ),
        "a JPEG, which changes values: save it as PNG",
    ),
    "nothing": (lambda: mask("d/masks/3.png", 255), "no pixel of a class, only 255"),
    "zero bytes": (lambda: Path("d/masks/3.png").write_bytes(b""), "zero bytes"),
    "no image": (lambda: Path("d/masks/3.png").write_text("hello"), "no image"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("names", [True, False], ids=["named", "unnamed"])
def test_bad_masks_are_named_or_left_out(case, names):
    write, reason = BAD[case]
    pairs()
    write()
    if names:
        Path("d/classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(DataError, match=rf"1 bad row: images/3.jpg \(mask: {reason}"):
        data.source_of(job("d")).load()
    splits = data.source_of(job("d", skip_bad=True)).load()
    assert sum(sizes(splits)[:2]) == 5
    assert splits.record["skipped"] == {"d": [3]}


def test_labels_beyond_the_classes():
    pairs()
    mask("d/masks/3.png", 0, 7)
    assert load().classes == ("0", "1", "2", "7")
    Path("d/classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(DataError, match=r"images/3.jpg \(mask: the value 7, which is none of 3 cl"):
        data.source_of(job("d")).load()
    Path("d/classes.txt").unlink()
    pairs("e", split="train")
    pairs("e", split="test")
    mask("e/test/masks/3.png", 4)
    with pytest.raises(DataError, match=r"test/images/3.jpg \(mask: the value 4, which is none of"):
        data.source_of(job("e")).load()


def test_images_and_masks_without_the_other():
    pairs()
    Path("d/masks/1.png").unlink()
    Path("d/images/2.jpg").unlink()
    picture(Path("d/images/3.png"))
    with pytest.raises(DataError) as caught:
        data.source_of(job("d"))
    assert "d has 3 bad rows: images/1.jpg (no mask of this name)" in (str(caught.value))
    assert "images/3.jpg (two images of this name)" in str(caught.value)


def test_names_that_are_not_utf8():
    pairs()
    odd = os.fsdecode(b"n\xff")
    picture(Path("d/images", f"{odd}.jpg"))
    mask(f"d/masks/{odd}.png")
    with pytest.raises(DataError, match=r"1 bad row: images/n\?.jpg \(its name is not UTF-8"):
        data.source_of(job("d")).load()


def test_masks_outside_the_folder_are_never_left_out():
    pairs("e")
    mask("secret.png")
    rows = [f"images/{i}.jpg,masks/{i}.png" for i in range(6)]
    table(Path("e/a.csv"), [*rows, "images/0.jpg,../secret.png"], "image,mask")
    with pytest.raises(DataError, match="name images by paths inside the folder of the table"):
        data.source_of(job("e/a.csv", skip_bad=True)).load()


@pytest.mark.parametrize(
    ("values", "has"), [([3, 255], "no class but 3"), ([0, 1200], "values up to 1,200")]
)
def test_masks_that_have_no_classes(values, has):
    pairs()
    for i in range(6):
        mask(f"d/masks/{i}.png", *values, mode="I;16")
    with pytest.raises(DataError, match=f"the masks of d have {has}, besides 255"):
        data.source_of(job("d"))


def test_only_bad_masks():
    pairs()
    for i in range(6):
        mask(f"d/masks/{i}.png", mode="RGB")
    with pytest.raises(DataError, match="d has 6 bad rows"):
        data.source_of(job("d", skip_bad=True))


def test_an_image_that_is_turned_has_the_size_that_it_is_shown_in():
    pairs()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", SIZE).save("d/images/3.jpg", exif=exif)
    mask("d/masks/3.png", size=SIZE[::-1])
    assert sum(sizes(load())[:2]) == 6


CONFIG = {
    "input_size": (3, 8, 10),
    "mean": (0.5, 0.4, 0.3),
    "std": (0.5, 0.25, 0.2),
    "interpolation": "bilinear",
}


def rows(*shades, size=(20, 16), **more):
    made = [picture(Path(f"{shade}.png"), shade, size) for shade in shades]
    own = [mask(f"m{shade}.png", 0, 1, 2, 255, size=size) for shade in shades]
    return {"image": [*map(Image.open, made)], "mask": [*map(Image.open, own)], **more}


def test_inputs_and_labels_of_one_size():
    found = masks.transform(CONFIG)(rows(90, 60))
    for shade, inputs, labels in zip((90, 60), found["inputs"], found["labels"], strict=True):
        assert (inputs.shape, inputs.dtype) == ((3, 8, 10), torch.float32)
        plain = torch.tensor([shade, 2 * shade, 50]) / 255
        expected = (plain - torch.tensor(CONFIG["mean"])) / torch.tensor(CONFIG["std"])
        torch.testing.assert_close(inputs[:, 3, 4], expected)
        assert (labels.shape, labels.dtype) == ((8, 10), torch.int64)
        # Every second column of 0, 1, 2, 255: no value between two classes is made.
        assert {*labels[0].tolist()} in ({0, 2}, {1, -100})
        assert type(inputs) is type(labels) is torch.Tensor
    assert masks.transform(CONFIG)({"image": rows(90)["image"]}).keys() == {"inputs"}


def test_values_below_the_first_class_are_ignored():
    change = masks.transform({**CONFIG, "input_size": (3, 16, 20)})
    (labels,) = change(rows(90, mask_classes=["1-2"]))["labels"]
    assert labels[0].tolist() == [-100, 0, 1, -100] * 5


@pytest.mark.parametrize("augment", ["crop", "rand"])
def test_an_image_and_its_mask_are_changed_together(augment):
    """The image shows its mask: where the class is 1 it is white."""
    wide = np.zeros((32, 32), np.uint8)
    wide[5:20, 8:27] = 1
    made = {"image": [Image.fromarray(wide * 255).convert("RGB")], "mask": [Image.fromarray(wide)]}
    config = {**CONFIG, "input_size": (3, 32, 32), "mean": (0,) * 3, "std": (1,) * 3}
    change = masks.augmented(config, augment)
    seen = set()
    for seed in range(6):
        torch.manual_seed(seed)
        (inputs,), (labels,) = change(made).values()
        shown = (inputs[0] > (inputs[0].max() + inputs[0].min()) / 2).long()
        alike = (shown == labels).float().mean()
        assert alike > (0.97 if augment == "crop" else 0.93)  # brighter edges count as white
        torch.manual_seed(seed)
        again = change(made)
        assert torch.equal(again["inputs"][0], inputs)
        assert torch.equal(again["labels"][0], labels)
        seen.add(labels.numpy().tobytes())
    assert len(seen) == 6


def test_gray_inputs():
    config = {**CONFIG, "input_size": (1, 8, 10), "mean": (0.5,), "std": (0.5,)}
    for change in (masks.transform(config), masks.augmented(config, "rand")):
        assert change(rows(90))["inputs"][0].shape == (1, 8, 10)
