"""Boxes of objects in folders of COCO, YOLO and Pascal VOC: what `Splits` has of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from PIL.ExifTags import Base

from razorctl import data, models
from razorctl.config.job import Job
from razorctl.data.own import whole
from razorctl.errors import DataError, UsageError
from tests.own import CLASSES, boxed, coco, photos, picture, refuses, sizes


def source_of(name="d", **settings):
    return data.source_of(Job("any", name, task="detection", **settings))


def load(name="d", **settings):
    return source_of(name, **settings).load()


def bad(said, name="d", error=DataError, **settings):
    refuses(error, said, "any", name, task="detection", **settings)


def of(splits, row=1):
    """The class names and the boxes of a training row."""
    found = splits.train[row]
    boxes = [[round(side, 6) for side in box] for box in found["boxes"]]
    return [splits.classes[number] for number in found["label"]], boxes


def test_rows_with_boxes():
    coco("d")
    source = source_of()
    assert source.details == (
        "d: boxes in annotations/all.json (COCO)",
        "3 classes of objects in 12 boxes: bus, car, tram",
        "11 rows to train on, 1 held out for validation",
    )
    splits = source.load()
    assert splits.train.column_names == ["image", "label", "boxes"]
    assert of(splits) == (["car"], [[2.0, 3.0, 23.0, 13.0]])
    assert splits.train[0]["label"] == splits.train[0]["boxes"] == []
    assert splits.notes == ("3 of 11 training images without boxes.",)
    assert splits.record["rows"] == load().record["rows"] != load(seed=3).record["rows"]


def test_digests_change_with_a_box_a_class_and_a_crowd():
    document = coco("d")
    seen = [load().digests]
    box = document["annotations"][0]
    for change in ({"bbox": [2, 3, 20, 9]}, {"category_id": 3}, {"iscrowd": 1}):
        coco(
            "d", document={**document, "annotations": [box | change, *document["annotations"][1:]]}
        )
        seen.append(load().digests)
    assert len({digests["train"] for digests in seen}) == 4
    assert "crowd" in load().train.column_names


PLACES = {
    "beside": ("d/all.json", "."),
    "in images": ("all.json", "images"),
    "roboflow": ("train/_annotations.coco.json", "train"),
    "as coco": ("annotations/instances_train2017.json", "train2017"),
    "in images of a split": ("annotations/instances_train.json", "images/train"),
    "in a folder of a split": ("annotations/train/instances.json", "train"),
    "labels": ("labels.json", "data"),
}


@pytest.mark.parametrize("case", [*PLACES][:-1])
def test_images_in_the_usual_places(case):
    json_file, images = PLACES[case]
    coco("d", json_file, str(Path(json_file).parent / images if images == "." else images))
    assert sizes(load()) == [11, 1, None]


def test_images_elsewhere_are_missing():
    coco("d", *PLACES["labels"])
    bad(r"12 bad rows: 0.jpg, .* \(missing\)")


def test_splits_of_coco_by_files_and_folders():
    for split in ("train", "valid", "test"):  # as Roboflow names them
        coco("d", f"{split}/_annotations.coco.json", split)
    assert sizes(load()) == [12, 12, 12]
    for split in ("train2017", "val2017"):
        coco("e", f"annotations/instances_{split}.json", split)
        coco("e", f"annotations/person_keypoints_{split}.json", split)
        Path(f"e/annotations/captions_{split}.json").write_text(
            json.dumps({"images": [], "annotations": [{"id": 1, "caption": "a cat"}]})
        )
    assert sizes(load("e")) == [12, 12, None]
    assert sizes(load("e/annotations/instances_val2017.json")) == [11, 1, None]
    coco("f", "test.json", "images", {**boxed(6), "annotations": []})
    coco("f", "train.json", "images")
    assert ", without test, which has no labels" in source_of("f").details[0]


def test_ids_of_any_kind():
    """Windows' separators, ids with gaps, floats and texts, a BOM, and an ending in capitals."""
    document = boxed(12)
    for entry in document["images"]:
        entry |= {"file_name": f"sub\\{entry['id']}.JPG", "id": f"{entry['id']}"}
    for entry in document["annotations"]:
        entry["image_id"] = float(entry["image_id"])
        entry["category_id"] = (0.0, 7.0, 90.0)[entry["category_id"] - 1]
    document["categories"] = [
        {"id": id_, "name": name} for id_, name in zip((90, 0, 7), "cab", strict=True)
    ]
    coco("d", document=document)
    file = Path("d/annotations/all.json")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    splits = load()
    assert splits.classes == ("a", "b", "c")
    assert of(splits)[0] == ["b"]


def test_a_category_above_all_others_is_no_class():
    document = boxed(12)
    for entry in document["categories"]:
        entry["supercategory"] = "things"
    document["categories"].insert(0, {"id": 0, "name": "things", "supercategory": "none"})
    coco("d", document=document)
    splits = load()
    assert splits.classes == CLASSES
    assert splits.notes[0].startswith("the category things has no box and stands above the others")
    document["categories"][1]["supercategory"] = "others"
    coco("d", document=document)
    assert load().notes[-1] == "1 class of 4 in no training image: things."


def change(part, number, **keys):
    """A COCO folder with one entry changed."""
    document = coco("d")
    document[part][number] |= keys
    Path("d/annotations/all.json").write_text(json.dumps(document))


# What is changed -> words of the error.
OF_COCO = {
    "outside": (
        ("annotations", 0, {"bbox": [50, 3, 20, 10]}),
        r"images/1.jpg \(annotation 1: a box from 50, 3 to 70, 13, outside of 60 x 40 pixels\)",
    ),
    "far outside": (("annotations", 0, {"bbox": [-50, 3, 20, 10]}), "annotation 1: a box from -50"),
    "no area": (("annotations", 3, {"bbox": [5, 3, 0, 10]}), "annotation 4: a box without area"),
    "swapped": (("annotations", 3, {"bbox": [9, 9, -4, 5]}), "side before the left or top one"),
    "nan": (("annotations", 3, {"bbox": [float("nan"), 9, 4, 5]}), "a box that is not finite"),
    "infinite": (("annotations", 3, {"bbox": [1, 9, 1e999, 5]}), "a box that is not finite"),
    "three numbers": (("annotations", 0, {"bbox": [1, 2, 3]}), "1: no box of four numbers"),
    "a text": (("annotations", 0, {"bbox": "1 2 3 4"}), "1: no box of four numbers"),
    "no category": (
        ("annotations", 0, {"category_id": 9}),
        "the category 9, which is not in the f",
    ),
    "no image": (
        ("annotations", 0, {"image_id": 99}),
        r"annotations/all.json, annotation 1 \(an annotation of an image that is not in the file",
    ),
    "twice": (("annotations", 0, {"id": 2}), "annotation 2: the id of another annotation, too"),
    "an image twice": (("images", 1, {"id": 0}), "two images of the id 0"),
    "a file twice": (("images", 1, {"file_name": "0.jpg"}), "its file is also the file of image 0"),
    "no name": (("images", 1, {"file_name": None}), r"all.json, image 1 \(no file_name\)"),
    "another size": (
        ("images", 1, {"width": 40, "height": 60}),
        r"\(boxes for 40 x 60 pixels, and the image has 60 x 40, turned by its EXIF orientation",
    ),
    "a half size": (("images", 1, {"width": 120, "height": 80}), "boxes for 120 x 80 pixels, and"),
}


@pytest.mark.parametrize("case", OF_COCO)
def test_bad_rows_of_coco(case):
    (part, number, keys), said = OF_COCO[case]
    change(part, number, **keys)
    bad(said)
    splits = load(skip_bad=True)
    assert len(splits.skipped) >= 1
    assert len(splits.train) + len(splits.validation) >= 10


def test_an_image_outside_of_its_folder_is_never_skipped():
    picture(Path("secret.jpg"), size=(60, 40))
    change("images", 1, file_name="../../secret.jpg")
    bad("outside the folder of its table", skip_bad=True)


def test_rounding_is_cut_at_the_border():
    change("annotations", 0, bbox=[-0.9, 3, 61.8, 37.2])
    assert of(load()) == (["car"], [[0.0, 3.0, 60.0, 40.0]])


def test_files_of_coco_that_cannot_be_used():
    coco("d", "train.json", "images", {**boxed(12), "annotations": []})
    coco("d", "val.json", "images")
    bad("no training image of d has a box; give some")
    Path("d/train.json").unlink()
    Path("d/val.json").unlink()
    document = boxed(12)
    for entry in document["annotations"]:
        entry["bbox"] = [side / 60 for side in entry["bbox"]]
    coco("d", document=document)
    bad(
        "12 of 12 boxes in d end within one pixel, as if they were shares of the image; give all of"
    )
    coco("e", "captions.json", document={"images": [], "annotations": [{"caption": "a"}]})
    bad(
        "e has no images with boxes, which detection learns from; give a folder of COCO",
        "e",
        UsageError,
    )
    coco("f", "train.json", "images")
    coco("f", "val.json", "images", boxed(12, 2) | {"categories": [{"id": 1, "name": "car"}]})
    bad("category 1 in .*/val.json is car, and bus elsewhere; give all", "f")
    document = coco("g", "val.json", "images")
    document["annotations"] = [each for each in document["annotations"] if each["category_id"] > 1]
    coco("g", "train.json", "images", document)
    bad("the validation split of g has 1 class that no training row has, such as bus", "g")
    Path("d/annotations/all.json").write_text('{"images": [], "annotations": [{"bbox": 1}], ')
    bad("d/annotations/all.json is not JSON")


def test_as_many_boxes_as_the_model_finds(monkeypatch):
    monkeypatch.setattr(models, "find", lambda *_: SimpleNamespace(most_objects=1))
    coco("d")
    bad(r"4 bad rows: images/2.jpg, .* \(2 boxes, and the model finds at most 1\)")


YAML = (
    "path: ../datasets/d\ntrain: images/train\nval: images/val\nnames: {0: bus, 1: car, 3: tram}\n"
)
LINES = ("", "0 0.5 0.5 0.2 0.5\n", "1 .2 .2 .2 .2\n\n3 .1 .1 .3 .1 .3 .4\n")


def yolo(top="d", splits=("train", "val"), described=YAML, images="images/{}", count=6):
    for split in splits:
        for i in range(count):
            image = picture(Path(top, images.format(split), f"{i}.JPG"), 9 * i, (60, 40))
            file = Path(str(image).replace("/images/", "/labels/")).with_suffix(".txt")
            file.parent.mkdir(parents=True, exist_ok=True)
            if i % 3 or i:  # an image without a file has no objects
                file.write_text(LINES[i % 3])
    if described:
        Path(top, "data.yaml").write_text(described)


def test_rows_of_yolo():
    yolo()
    source = source_of()
    assert source.details[0] == "d: boxes in data.yaml (YOLO)"
    splits = source.load()
    assert sizes(splits) == [6, 6, None]
    assert splits.classes == CLASSES
    assert of(splits) == (["bus"], [[24.0, 10.0, 36.0, 30.0]])
    assert of(splits, 2) == (["car", "tram"], [[6.0, 4.0, 18.0, 12.0], [6.0, 4.0, 18.0, 16.0]])
    assert splits.train[0]["label"] == []
    assert source_of("d/data.yaml").train_examples == 6


DESCRIBED = {
    "roboflow": ("{}/images", "train: ../train/images\nval: ../val/images\nnc: 4\n"
                 "names: ['bus', 'car', 'tram', 'van']", [6, 6, None]),
    "a list": ("images/{}", "train: [images/train, images/val]\nnc: 4", [11, 1, None]),
    "a test that is not there": ("images/{}", YAML + "test: images/test\n", [6, 6, None]),
    "an absolute path": ("images/{}", YAML.replace("../datasets", "/home/me"), [6, 6, None]),
    "of Windows": ("images/{}", "train: images\\train\nval: .\\images\\val\nnc: 4", [6, 6, None]),
    "years": ("images/{}2017", "", [6, 6, None]),
    "beside": ("{}", "train: train\nval: val\nnames: [a, b, c, d]", [6, 6, None]),
}  # fmt: skip


@pytest.mark.parametrize("case", DESCRIBED)
def test_paths_of_a_description(case):
    images, described, expected = DESCRIBED[case]
    yolo(described=described, images=images)
    splits = load()
    assert sizes(splits) == expected
    assert any(splits.train["label"])


def test_lists_of_images():
    yolo(described="train: train.txt\nval: images/val\nnames: [a, b, c, d]")
    Path("d/train.txt").write_text("\n".join(f"./images/train/{i}.JPG" for i in range(4)))
    assert sizes(load()) == [4, 6, None]


def test_yolo_without_a_description():
    yolo(described="")
    assert load().classes == ("0", "1", "3")
    Path("d/classes.txt").write_text("bus\ncar\nvan\ntram\n")
    splits = load()
    assert splits.classes == ("bus", "car", "van", "tram")
    assert splits.notes[-1] == "1 class of 4 in no training image: van."
    yolo("e", [""], "", "{}", 12)
    Path("e/classes.txt").write_text("bus\ncar\nvan\ntram\n")
    assert sizes(load("e")) == [11, 1, None]


OF_YOLO = {
    "pixels": ("0 30 20 12 20\n", "line 1: numbers above 1, as if of pixels, not shares"),
    "a class without a name": ("\n2 .5 .5 .2 .2\n", "line 2: a class of 2, which has no name"),
    "a confidence": ("0 .5 .5 .2 .2 .9\n", "line 1: 6 numbers, not a class and four, or an outl"),
    "letters": ("bus .5 .5 .2 .2\n", "line 1: not all numbers"),
    "outside": (
        "0 .9 .5 .4 .2\n",
        "line 1: a box from 42, 16 to 66, 24, outside of 60 x 40 pixels",
    ),
    "no area": ("0 .5 .5 0 .2\n", "line 1: a box without area"),
    "nan": ("0 .5 .5 nan .2\n", "line 1: a box that is not finite"),
    "half a class": ("0.5 .5 .5 .2 .2\n", "line 1: a class of 0.5, which is not a whole number"),
}


@pytest.mark.parametrize("case", OF_YOLO)
def test_bad_rows_of_yolo(case):
    text, said = OF_YOLO[case]
    yolo()
    Path("d/labels/train/1.txt").write_text(text)
    bad(rf"1 bad row: labels/train/1.txt \({said}")
    assert len(load(skip_bad=True).train) == 5


def test_folders_of_yolo_that_cannot_be_used():
    yolo()
    Path("d/labels/train/77.txt").write_text(LINES[1])
    bad(r"labels/train/77.txt \(labels without an image\)")
    yolo("e", described="train: ../../other/images\nval: images/val\nnames: [a]")
    bad("the training images of .*e/data.yaml are not in .*e; correct its paths", "e")
    yolo("e", described="train: images/train\nnames: [a]\nnc: 3")
    bad("data.yaml has 1 name, and nc is 3; correct it", "e")
    yolo("e", described="train: images/train\nnames: {a: b}\n")
    bad("names no classes by their numbers", "e")
    yolo("e", described="train: images/train\nnames: [a]\nkpt_shape: [2, 3]")
    bad("data.yaml is of keypoints", "e")
    yolo("e", described="train: images/train\nnames: [a\n")
    bad("data.yaml is not YAML", "e")


def xml(name="1.jpg", size=(60, 40), objects=1, box=(1, 2, 30, 20), more="", head=""):
    sides = "".join(
        f"<{side}>{value}</{side}>"
        for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    each = f"<object><name>cat</name>{more}<bndbox>{sides}</bndbox></object>" * objects
    return (
        f"{head}<annotation><filename>{name}</filename><size><width>{size[0]}</width><height>"
        f"{size[1]}</height></size>{each}</annotation>"
    )


def voc(top="d", images="JPEGImages", annotations="Annotations", count=6, **sets):
    for i in range(count):
        picture(Path(top, images, f"{i}.jpg"), 9 * i, (60, 40))
        Path(top, annotations).mkdir(parents=True, exist_ok=True)
        Path(top, annotations, f"{i}.xml").write_text(xml(f"{i}.jpg"))
    for split, stems in sets.items():
        Path(top, "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        Path(top, "ImageSets/Main", f"{split}.txt").write_text("\n".join(stems))


def test_rows_of_voc():
    voc(train="0123", val="45", test=["800", "801"])
    Path("d/Annotations/1.xml").write_text(
        xml(more="<difficult>1</difficult><part><name>head</name></part>")
    )
    picture(Path("d/SegmentationClass/1.png"))  # as VOC 2012 has, too
    source = source_of()
    assert source.details[0] == "d: boxes in Annotations (Pascal VOC)"
    splits = source.load()
    assert sizes(splits) == [4, 2, None]
    assert of(splits) == (["cat"], [[1.0, 2.0, 30.0, 20.0]])
    assert splits.train["crowd"][:2] == [[0], [1]]
    assert splits.validation["crowd"][0] == [0]


def test_folders_of_voc():
    for split in ("train", "valid", "test"):  # as Roboflow writes them
        voc("a", split, split)
    assert sizes(load("a")) == [6, 6, 6]
    voc("b", "images", "annotations")
    picture(Path("b/images/7.jpg"), size=(60, 40))
    assert ", without 1 image that no XML file in use is for" in source_of("b").details[0]
    voc("flat", ".", ".")  # as LabelImg writes them
    assert sizes(load("flat")) == [5, 1, None]
    voc("deep", "images", "annotations/xmls")
    assert sizes(load("deep")) == [5, 1, None]
    voc("c/VOC2007", trainval="0123", test="45")
    assert sizes(load("c")) == [3, 1, 2]
    voc("c/VOC2012", trainval="0123")
    bad("has several sets of Pascal VOC, VOC2007, VOC2012; name one", "c", UsageError)


OF_VOC = {
    "an entity": (
        xml(head='<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]>', name="&e;"),
        "a DTD, which is not read",
    ),
    "a bomb": (xml(head='<!DOCTYPE a [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]>'), "a DTD, which is"),
    "no XML": ("<annotation>", "not XML: no element found"),
    "no number": (xml(box=(1, "", 3, 4)), "object 1: no bndbox of four numbers"),
    "outside": (xml(box=(1, 2, 90, 20)), "object 1: a box from 1, 2 to 90, 20, outside of 60 x 40"),
    "swapped": (xml(box=(30, 2, 1, 20)), "object 1: a right or bottom side before the left or top"),
    "of another size": (xml(size=(600, 400)), "boxes for 600 x 400 pixels, and the image has 60"),
    "the image of another": (xml("2.jpg"), "2.jpg is its filename, and 1.jpg has its name"),
}


@pytest.mark.parametrize("case", OF_VOC)
def test_bad_rows_of_voc(case):
    text, said = OF_VOC[case]
    voc()
    Path("d/Annotations/1.xml").write_text(text)
    bad(rf"1 bad row: Annotations/1.xml \(.*{said}")
    assert sizes(load(skip_bad=True)) == [4, 1, None]


def test_boxes_of_an_image_that_its_exif_orientation_turns():
    """An image of 60 x 40 that is stored lying: its boxes are for the image as it is seen."""
    voc()
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    Image.new("RGB", (40, 60)).save("d/JPEGImages/1.jpg", exif=exif)
    splits = load()
    assert [row["image"].size for row in splits.train] == [(60, 40)] * len(splits.train)
    Image.new("RGB", (60, 40)).save("d/JPEGImages/1.jpg", exif=exif)
    bad("boxes for 60 x 40 pixels, and the image has 40 x 60, turned by its EXIF orientation")


def test_other_models_are_told_which_models_find_objects(monkeypatch):
    family = models.find("vit-micro")
    finder = models.ModelEntry("finder", "", "image", ("detection",), lambda _: family)
    monkeypatch.setitem(models.models(), "finder", finder)
    coco("a")
    yolo("b")
    voc("c")
    for name, kind in zip("abc", ("COCO", "YOLO", "Pascal VOC"), strict=True):
        for model in ("vit-micro", "bert-base"):
            said = (
                rf"{name} has boxes of objects \({kind}\), by .*, which are for detection, and .*"
            )
            refuses(UsageError, f"{said} is not; choose one of .*finder", model, name)
        assert data.source_of(Job("finder", name)).task == "detection"
    photos(Path("e"))
    refuses(UsageError, "e has no images with boxes, which detection learns", "finder", "e")


def test_labels_of_a_run_and_images_without_labels():
    coco("d")
    job = Job("any", "d", task="detection")
    rows, split, _ = whole.labeled(job, "image", ("van", "tram", "car", "bus"))
    assert split is None
    assert rows["label"][:3] == [[], [2], [1, 3]]
    assert rows[1]["boxes"] == [[2.0, 3.0, 23.0, 13.0]]
    with pytest.raises(DataError, match="not classes of the run: 'tram'"):
        whole.labeled(job, "image", ("car", "bus"))
    parts, _ = whole.unlabeled(["d"], job, "image")
    assert len(parts[0].data) == 12


ODD = {
    "a long name": ("images", 1, {"file_name": "a" * 5000}, "File name too long"),
    "a NUL": ("images", 1, {"file_name": "a\0.jpg"}, "no path"),
    "large numbers": ("annotations", 0, {"bbox": [10**400, 1, 2, 3]}, "a box that is not finite"),
    "half a character": ("annotations", 0, {"id": "\ud800"}, "half a character: a lone surrogate"),
    "one name twice": ("categories", 0, {"name": "car"}, "d has two classes called car; rename"),
    "no name": ("categories", 0, {"name": 3}, "a category in .*all.json has no id or no name"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_values_are_refused(case):
    part, number, keys, said = ODD[case]
    change(part, number, **keys)
    bad(said)


def test_a_description_runs_nothing_and_has_no_bombs():
    yolo(described="train: images/train\nnames: !!python/object/apply:os.system ['touch gone']")
    bad("data.yaml is not YAML")
    assert not Path("gone").exists()
    rounds = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9))
    yolo(described=f"l0: &l0 [x]\n{rounds}train: images/train\nnames: *l8\n")
    bad("names no classes by their numbers")
    yolo(described=f"l0: &l0 [x]\n{rounds}train: *l8\nnames: [a]\n")
    bad("the training images of .*d/data.yaml are not in")
