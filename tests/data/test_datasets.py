"""The contract of a data set, for every one; the hub's are small local copies."""

from functools import partial

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Image
from PIL import Image as Pictures

from razorctl.config.job import Job
from razorctl.data import DATASETS, check, find, source_of, usual
from razorctl.data import hub as hub_sets
from razorctl.errors import DataError, MissingError, UsageError
from razorctl.models import masks
from tests import local_hub

LABELED = [name for name, source in DATASETS.items() if source.task == "classification"]
HUB = sorted(set(LABELED) - {"digits"})
COLUMNS = {
    "image": ({"image", "label"},),
    "text": ({"text", "label"}, {"text", "text_pair", "label"}),
}


@pytest.mark.parametrize("name", LABELED)
def test_rows_have_the_columns_of_their_modality_and_labels_in_range(name, hub):
    source = find(name)
    assert source.summary
    if name in HUB:
        local_hub.cache_data(hub, source)
    splits = source.load()
    assert len(splits.classes) == source.classes
    for split in (splits.train, splits.test):
        assert set(split.column_names) in COLUMNS[source.modality]
        assert set(split["label"]) <= set(range(source.classes))
        if source.modality == "image":
            assert split[1]["image"].size[0] > 0


def test_digits():
    source, splits = find("digits"), find("digits").load()
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert (source.train_examples, source.test_examples) == (1437, 360)
    assert splits.classes == tuple("0123456789")
    for split in (splits.train, splits.test):
        assert set(split["label"]) == set(range(10))
    image = splits.train[0]["image"]
    assert image.size == (8, 8)
    assert image.mode == "L"
    assert image.getextrema() == (0, 255)
    # No image is in both splits.
    train, test = ({row["image"].tobytes() for row in s} for s in (splits.train, splits.test))
    assert not train & test


def test_parquet_that_another_library_wrote(hub):
    local_hub.strip(local_hub.cache_data(hub, find("cifar10"), count=20))
    splits = find("cifar10").load()
    assert splits.train[3]["image"].getpixel((0, 0)) == (3, 6, 50)
    assert splits.classes == tuple("0123456789")
    assert splits.test["label"][:12] == [*range(10), 0, 1]


GLUE = {
    "cola": "sentence",
    "sst2": "sentence",
    "mrpc": "sentence1 sentence2",
    "rte": "sentence1 sentence2",
    "wnli": "sentence1 sentence2",
    "qqp": "question1 question2",
    "qnli": "question sentence",
    "mnli": "premise hypothesis",
}


@pytest.mark.parametrize("task", GLUE)
def test_tasks_of_glue_have_their_texts_in_order(task):
    origin = local_hub.repository(find(task))
    texts = {own: theirs for theirs, own in origin["columns"].items() if own != "label"}
    assert " ".join(texts[own] for own in sorted(texts)) == GLUE[task]
    split = "validation_matched" if task == "mnli" else "validation"
    assert origin["test"] == (f"{task}/{split}-*.parquet",)
    assert find(task).classes == (3 if task == "mnli" else 2)


@pytest.mark.parametrize("name", HUB)
def test_what_is_not_cached_is_missing(name, hub):
    sentence = f"{name} is not in the local cache and the hub cannot be reached; run once with"
    with pytest.raises(MissingError, match=sentence):
        find(name).load()
    folder = local_hub.cache_data(hub, find(name))
    next(folder.glob("snapshots/*/*/t*")).unlink()
    with pytest.raises(MissingError, match=sentence):
        find(name).load()


BAD = {
    "no column img, only": lambda d: d.rename_column("img", "picture"),
    "7 classes, not 100": lambda d: d.cast_column("fine_label", ClassLabel(names=list("abcdefg"))),
    "rows without a label": lambda d: d.map(lambda row: {"fine_label": -1}),
}


@pytest.mark.parametrize("message", BAD)
def test_data_that_is_not_what_it_should_be(message, hub):
    local_hub.cache_data(hub, find("cifar100"), count=7, edit=BAD[message])
    with pytest.raises(DataError, match=f"^cifar100 has {message}"):
        find("cifar100").load()


def test_a_damaged_file_is_named(hub):
    folder = local_hub.cache_data(hub, find("cifar100"))
    for file in folder.glob("blobs/*"):
        file.write_bytes(b"half a fi")
    with pytest.raises(DataError, match=r"cifar100 cannot be read \(.*\); delete .*/datasets--uof"):
        find("cifar100").load()


def scene_parse_150(snapshot, column="annotation"):
    """A photograph of which the first column is of no class, the others of the first and last."""
    mask = Pictures.fromarray(np.tile(np.uint8([0, 1, 150]), (2, 1)))
    for split, count in {"train": 3, "validation": 2}.items():
        photos = [Pictures.new("RGB", (3, 2), (i, 2 * i, 50)) for i in range(count)]
        rows = Dataset.from_dict(
            {"image": photos, column: [mask] * count, "scene_category": [0] * count}
        )
        rows = rows.cast_column("image", Image()).cast_column(column, Image())
        (snapshot / "scene_parsing" / split).mkdir(parents=True)
        rows.to_parquet(snapshot / "scene_parsing" / split / "0000.parquet")


def cached_scenes(hub, **settings):
    """In the branch that has Parquet files."""
    folder = local_hub.cache(hub, "dataset", hub_sets.SCENES, partial(scene_parse_150, **settings))
    branch = folder / "refs" / hub_sets.SCENES_BRANCH
    branch.parent.mkdir(parents=True)
    (folder / "refs" / "main").rename(branch)


def test_scenes_have_a_mask_without_the_class_of_all_others(hub):
    cached_scenes(hub)
    source = find("scene_parse_150")
    splits = source.load()
    assert (source.task, source.classes, len(splits.classes)) == ("segmentation", 150, 150)
    assert (splits.classes[0], splits.classes[149]) == ("wall", "flag")
    assert (len(splits.train), splits.validation, len(splits.test)) == (3, None, 2)
    row = splits.train[1]
    assert row["image"].getpixel((0, 0)) == (1, 2, 50)
    assert masks.mask_labels(row["mask"], row["mask_classes"]).tolist() == [[-100, 0, 149]] * 2


def test_scenes_of_other_columns_are_refused(hub):
    cached_scenes(hub, column="picture")
    with pytest.raises(DataError, match="scene_parse_150 has no column annotation, only image"):
        find("scene_parse_150").load()


def test_the_usual_data_set_is_for_the_task():
    for task, modality in (
        ("classification", "image"),
        ("classification", "text"),
        ("segmentation", "image"),
        ("causal-lm", "text"),
    ):
        source = find(usual(task, modality))
        assert (source.task, source.modality) == (task, modality)
    # The same texts are for any language model.
    assert source_of(Job("bert-base", usual("masked-lm", "text"))).task == "masked-lm"


def test_what_only_classes_have_is_refused_for_other_tasks():
    with pytest.raises(UsageError, match="scene_parse_150 is for segmentation; leave them out"):
        check(Job("segformer-b0", "scene_parse_150", mixup=0.2))
    assert check(Job("segformer-b0", "scene_parse_150")).task == "segmentation"
    with pytest.raises(UsageError, match="rte is for classification; leave --task out, or name da"):
        check(Job("bert-base", "rte", task="masked-lm"))


def test_wikitext_is_a_text_for_each_split(hub):
    def write(snapshot):
        for split in ("train", "validation", "test"):
            file = snapshot / f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet"
            file.parent.mkdir(exist_ok=True)
            lines = ["", f" = {split} = \n", "", " A cat sat . \n"]
            Dataset.from_dict({"text": lines}).to_parquet(file)

    local_hub.cache(hub, "dataset", "Salesforce/wikitext", write)
    splits = find("wikitext2").load()
    assert splits.classes == ()
    for split in ("train", "validation", "test"):
        assert list(getattr(splits, split)["text"]) == [f" = {split} = \n A cat sat . \n"]
