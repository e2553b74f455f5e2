"""Data that look like what a model is not for: each kind is refused by its name, and no other."""

from pathlib import Path

import pytest
from datasets import Audio, Dataset, Image, Value
from datasets import Features as Kinds

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own.read import hub as hubs
from tests import local_hub
from tests.own import masked, photos, picture, refused, table, written

PROSE = [f"a long text, number {i}" for i in range(8)]
LISTS, FEW = [["a", "b"]] * 8, [0, 1] * 4
IMAGES = [f"{i}.png" for i in range(8)]
# Columns -> what they are called.
TABLES = {
    "preferences": ({"prompt": PROSE, "chosen": PROSE, "rejected": PROSE}, "preference pairs, DPO"),
    "marked": ({"prompt": PROSE, "completion": PROSE, "label": FEW}, "preferences, KTO"),
    "two answers": ({"prompt": PROSE, "response_0": PROSE, "response_1": PROSE}, "pairs, DPO"),
    "trees": (
        {"message_id": PROSE, "parent_id": PROSE, "text": PROSE, "role": FEW},
        "nodes of trees (OASST)",
    ),
    "seen": (
        {"image": PROSE, "conversations": [[{"from": "human", "value": "a"}]] * 8},
        "conversations with images",
    ),
    "alike": ({"anchor": PROSE, "positive": PROSE, "negative": PROSE}, "triplets for embeddings"),
    "questions": ({"context": PROSE, "question": PROSE, "answers": [{"text": ["a"]}] * 8}, "SQuAD"),
    "choices": ({"question": PROSE, "choices": LISTS, "answer": FEW}, "multiple choice"),
    "languages": ({"id": FEW, "translation": [{"en": "a", "de": "b"}] * 8}, "translations"),
    "columns of languages": ({"en": PROSE, "fr": PROSE}, "translations"),
    "summaries": ({"text": PROSE, "summary": PROSE}, "texts and summaries"),
    "instructions": ({"instruction": PROSE, "input": [""] * 8, "output": PROSE}, "for causal-lm, "),
    "completions": ({"prompt": PROSE, "completion": PROSE}, "prompts and answers, which are for c"),
    "asked": ({"question": PROSE, "answer": PROSE, "topic": FEW}, "prompts and answers, which"),
    "steps": ({"prompt": PROSE, "completions": LISTS, "labels": LISTS}, "process rewards, PRM"),
    "prompts": ({"prompt": PROSE, "solution": FEW}, "prompts without answers"),
    "targets": ({"source": PROSE, "target": PROSE}, "sources and targets"),
    "captions": ({"image": IMAGES, "caption": PROSE}, "images with captions"),
    "texts of images": ({"file_name": IMAGES, "text": PROSE}, "images with captions"),
    "questions on images": ({"image": IMAGES, "question": PROSE, "answer": FEW}, "on images"),
    "boxes": ({"image": IMAGES, "objects": [{"bbox": [[1, 2, 3, 4]]}] * 8}, "boxes of obj"),
    "a row for each box": (
        {
            "file": IMAGES[:4] * 2,
            "class": FEW,
            **dict.fromkeys(("xmin", "ymin", "xmax", "ymax"), FEW),
        },
        "object detection",
    ),
    "sound": ({"audio": [f"{i}.wav" for i in range(8)], "label": FEW}, "has sound"),
    "sound at paths": ({"path": [f"{i}.mp3" for i in range(8)], "sentence": PROSE}, "has sound"),
}
MODELS = ("bert-base", "gpt2", "vit-micro")
FINE = {
    "more columns": ({"text": PROSE, "label": FEW, "prompt": PROSE, "summary": PROSE}, "bert-base"),
    "a target of classes": ({"source": PROSE, "target": FEW}, "bert-base"),
    "answers that are classes": ({"question": PROSE, "answer": ["yes", "no"] * 4}, "bert-base"),
    "classes with a caption": ({"image": IMAGES, "caption": PROSE, "label": FEW}, "vit-micro"),
    "classes with a box": (
        {"image": IMAGES, "bbox": [[1, 2, 3, 4]] * 8, "label": FEW},
        "vit-micro",
    ),
    "a row for each image": (
        {"file": IMAGES, "class": FEW, **dict.fromkeys(("xmin", "ymin", "xmax", "ymax"), FEW)},
        "vit-micro",
    ),
    "instructions with inputs": ({"instruction": PROSE, "input": PROSE, "output": PROSE}, "gpt2"),
    "one instruction": ({"instruction": ["Go on."] * 8, "input": PROSE, "output": PROSE}, "gpt2"),
    "texts with a figure": ({"text": PROSE, "score": [i / 3 for i in range(8)]}, "gpt2"),
    "a review in short": ({"review": PROSE, "summary": PROSE, "mood": FEW}, "bert-base"),
}


@pytest.fixture
def pictures():
    for i, name in enumerate(IMAGES):
        picture(Path(name), 9 * i)


@pytest.mark.parametrize("case", TABLES)
def test_a_table_of_another_kind(case, pictures):
    columns, what = TABLES[case]
    name = written(columns)
    # A causal model may learn from answers.
    others = case in ("instructions", "completions", "asked")
    alike = case == "alike"  # models of texts learn them
    for model in ("bert-base", "vit-micro") if others else ("vit-micro",) if alike else MODELS:
        said = refused(model, name)
        assert what in said
        assert said.startswith("a.jsonl has ")
        assert said.count(". ") == 0


@pytest.mark.parametrize("case", FINE)
def test_a_table_that_is_fine(case, pictures):
    columns, model = FINE[case]
    assert data.source_of(Job(model, written(columns))).train_examples in (7, None)


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_every_kind_of_file(kind):
    assert "sources and targets" in refused("gpt2", written(TABLES["targets"][0], kind))


def test_columns_that_are_named_are_what_the_user_means():
    written(TABLES["targets"][0])
    source = data.source_of(Job("gpt2", "a.jsonl", text_column="target"))
    assert source.task == "causal-lm"


def test_any_other_document_is_no_table():
    Path("a.json").write_text('{"text": "a b", "label": 1}')
    assert "a.json is one JSON document, not a list; write a list of" in refused("gpt2", "a.json")
    Path("a.json").write_text('{"data": [{"title": "x", "paragraphs": []}], "version": "2"}')
    assert "SQuAD" in refused("bert-base", "a.json")
    Path("a.json").write_text("")
    assert "one JSON document" in refused("bert-base", "a.json")


COCO = '{"images": [], "annotations": [{"image_id": 1, "bbox": [1, 2, 3, 4]}], "categories": []}'


def put(*files):
    """Writes files, each of a path and a text; those without are images."""
    for path, text in files:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text) if text else picture(Path(path))


LINES = "0 0.5 0.5 0.1 0.2\n3 .1 .2 .3 .4\n"
BOX = "<annotation><object><bndbox></bndbox></object></annotation>"
FOLDERS = {
    "COCO": (
        lambda: put(("d/images/1.jpg", ""), ("d/annotations/all.json", COCO)),
        "(COCO), by ann",
    ),
    "COCO of splits": (
        lambda: put(("d/train/1.jpg", ""), ("d/train/_annotations.coco.json", COCO)),
        "(COCO)",
    ),
    "YOLO": (lambda: put(("d/images/train/1.jpg", ""), ("d/labels/train/1.txt", LINES)), "(YOLO)"),
    "YOLO of splits": (
        lambda: put(("d/train/images/1.jpg", ""), ("d/train/labels/1.txt", LINES)),
        "boxes of objects (YOLO), by train/labels/1.txt",
    ),
    "YOLO beside images": (lambda: put(("d/train/1.jpg", ""), ("d/train/1.txt", LINES)), "(YOLO)"),
    "VOC": (lambda: put(("d/JPEGImages/1.jpg", ""), ("d/Annotations/1.xml", BOX)), "(Pascal VOC)"),
    "sound": (lambda: put(("d/a/1.wav", "x"), ("d/b/1.wav", "x")), "has sound"),
    "captions": (lambda: put(("d/1.jpg", ""), ("d/1.txt", "a cat")), "images with captions"),
    "splits without classes": (
        lambda: put(("d/train/1.jpg", ""), ("d/val/2.jpg", "")),
        "by train,",
    ),
    "masks": (lambda: masked("d"), "are for segmentation, and vit-micro is not; choose one of vit"),
    "masks of splits": (lambda: masked("d", split="train"), "images with masks, which are for seg"),
    "masks as of VOC": (lambda: masked("d", "JPEGImages", "SegmentationClass"), "images with mask"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_of_another_kind(case):
    write, what = FOLDERS[case]
    write()
    assert what in refused("vit-micro", "d")
    if case.startswith("masks"):
        assert data.source_of(Job("vit-b16", "d")).task == "segmentation"
        assert refused("bert-base", "d").startswith("d has images with masks, which are for seg")


def test_classes_of_texts():
    for split in ("train", "test"):
        put(*((f"d/{split}/{mood}/{i}.txt", "a b c") for mood in ("neg", "pos") for i in range(3)))
    assert "a folder of texts for each class" in refused("bert-base", "d")
    assert data.source_of(Job("gpt2", "d")).task == "causal-lm"


def test_folders_that_are_fine():
    photos(Path("d"))
    put(("d/car/0.txt", LINES), ("d/car/0.xml", BOX), ("d/car/0.json", "{"), ("d/some.json", "[]"))
    assert data.source_of(Job("vit-micro", "d")).classes == 3
    masked("e")
    assert data.source_of(Job("vit-micro", "e", task="classification")).classes == 2


def test_a_table_of_masks():
    masked("d")
    table(Path("d/a.csv"), [f"images/{i}.jpg,masks/{i}.png" for i in range(6)], "image,label")
    assert "images with masks, which are for segmentation" in refused("vit-micro", "d/a.csv")


OF_HUB = {
    "captions": (Kinds({"image": Image(), "caption": Value("string")}), "images with captions"),
    "sound": (Kinds({"sound": Audio(), "text": Value("string")}), "has sound"),
    "preferences": (Kinds({"chosen": Value("string"), "rejected": Value("string")}), "DPO"),
}


@pytest.mark.parametrize("case", OF_HUB)
def test_sets_of_the_hub_by_their_card_alone(case, hub, monkeypatch):
    kinds, what = OF_HUB[case]
    found = hubs.Origin("some/set", "parquet", {"train": ("a",)}, {}, kinds, {"train": 9})
    monkeypatch.setattr(hubs, "origin_of", lambda job: found)
    monkeypatch.setattr(hubs, "hub_rows", lambda job: pytest.fail("data were read"))
    assert what in refused("bert-base", "hf:some/set")


def test_sets_of_the_hub_without_a_card(hub):
    def write(snapshot):
        Dataset.from_dict(TABLES["asked"][0]).to_parquet(snapshot / "train.parquet")

    local_hub.cache(hub, "dataset", "some/set", write)
    assert "prompts and answers" in refused("bert-base", "hf:some/set")
    splits = data.source_of(Job("gpt2", "hf:some/set")).load()
    assert [said["content"] for said in splits.train[0]["messages"]] == PROSE[:1] * 2
