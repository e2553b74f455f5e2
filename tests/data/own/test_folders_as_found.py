"""Folders as people have them: saved, cloned, unpacked, one level too deep; links and caches."""

from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import whole
from razorctl.errors import DataError
from tests.own import photos, picture, refused, refuses, sizes, table, texts


def loaded(dataset, model="bert-base", **settings):
    """The classes, and the rows of each split."""
    splits = data.source_of(Job(model, dataset, **settings)).load()
    return splits.classes, sizes(splits)


def rows(count=10, **more):
    return Dataset.from_dict({"text": [f"a text {i}" for i in range(count)], **more})


def moods(count=10):
    kinds = ClassLabel(names=["pos", "neg"])
    return rows(count, label=[0, 1] * (count // 2)).cast_column("label", kinds)


def test_what_datasets_has_saved():
    DatasetDict(train=moods(), validation=moods(6), test=moods(4)).save_to_disk("d")
    Path("d/train/cache-1.arrow").write_bytes(b"no data")
    assert loaded("d") == (("pos", "neg"), [10, 6, 4])
    assert loaded("d/train", validation=0.2) == (("pos", "neg"), [8, 2, None])
    name = next(Path("d/train").glob("data-*.arrow"))
    assert loaded(str(name), validation=0.2) == (("pos", "neg"), [8, 2, None])
    rows(30).save_to_disk("texts", num_shards=3)
    source = data.source_of(Job("bert-base", "texts"))
    assert (source.task, len(source.load().train)) == ("masked-lm", 27)


CARD = "---\nlicense: mit\nconfigs:\n{}---\n" + "A long text of a card.\n\n\n" * 9
ONE = "- config_name: default\n  data_files:\n  - split: train\n    path: {}\n"
LIST = "  data_files:\n  - {split: train, path: [a.csv, b.csv]}\n  - {split: test, path: c.csv}\n"
TWO = "- {config_name: x, data_files: x.csv}\n- {config_name: y, data_files: y.csv"
DEFAULT = f"{TWO.partition('- {config_name: y')[0]}{ONE.format('[a.csv, b.csv]')}"
TABLES = {  # files, the header of a card -> rows of each split
    "data": (("data/train-0-of-1.csv", "data/test-0-of-1.csv"), "", [11, 1, 12]),
    "named": (("x/one.csv", "x/two.csv"), ONE.format("x/one.csv"), [11, 1, None]),
    "patterns": (("en/a-1.csv", "en/a-2.csv", "en/b.csv"), ONE.format("en/a-*"), [22, 2, None]),
    "beside": (("data/train-0.csv", "data/test-0.csv"), ONE.format("data/train-*"), [11, 1, 12]),
    "a list": (("a.csv", "b.csv", "c.csv"), f"- config_name: x\n{LIST}", [22, 2, 12]),
    "defaults": (("default/train/0000.csv", "default/test/0000.csv"), "", [11, 1, 12]),
    "of several": (("x.csv", "y.csv"), f"{TWO}, default: true}}\n", [11, 1, None]),
    "called default": (("x.csv", "a.csv", "b.csv"), DEFAULT, [22, 2, None]),
    "of splits": (("train/a.csv", "train/b.csv", "test/a.csv"), None, [22, 2, 12]),
    "of training alone": (("train/a.csv",), None, [11, 1, None]),
    "by other words": (("training_set/a.csv", "validation_set/b.csv"), None, [12, 12, None]),
    "words in files": (("imdb_train.csv", "imdb_test.csv"), None, [11, 1, 12]),
    "parts": (("x-00000-of-00002.csv", "x-00001-of-00002.csv"), None, [22, 2, None]),
}


@pytest.mark.parametrize("case", TABLES)
def test_folders_of_tables(case):
    files, header, sizes = TABLES[case]
    for file in files:
        texts(Path("d", file))
    if header is not None:
        Path("d/README.md").write_text(CARD.format(header))
    assert loaded("d") == (("neg", "pos"), sizes)


def test_tables_beside_images_that_are_no_splits_are_no_data():
    photos(Path("d/images"))
    texts(Path("d/x.csv"))
    texts(Path("d/y.csv"))
    assert "all images of d are in d/images" in refused("vit-micro", "d")


def test_cards_that_do_not_settle_it():
    texts(Path("d/x.csv"))
    texts(Path("d/y.csv"))
    Path("d/README.md").write_text(CARD.format(f"{TWO}}}\n"))
    assert "d has several configs, x, y, by its README.md; name" in refused("bert-base", "d")
    Path("d/README.md").write_text(CARD.format("- {\n"))
    assert "the header of d/README.md cannot be read" in refused("bert-base", "d")
    Path("d/README.md").write_text("no header")
    assert "none of the splits of d is called train, only x, y; name" in refused("bert-base", "d")
    assert loaded("d", split="x,,y") == (("neg", "pos"), [11, 1, 12])
    Path("e").mkdir()
    Path("e/README.md").write_text("A text\n\n\n" * 9)
    assert "e has no folders with images" in refused("bert-base", "e")


def test_tables_that_are_deeper():
    texts(Path("d/en/train.csv"))
    texts(Path("d/de/train.csv"))
    texts(Path("up/more/set/train.csv"))
    assert "d has no tables itself; name d/de or d/en." in refused("bert-base", "d")
    assert "name up/more/set." in refused("gpt2", "up")


def prose(*files):
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(f"A text of {file}.\n")


def test_folders_of_more_than_texts():
    prose("d/a.txt", "d/b.txt", "d/README.md", "d/LICENSE")
    source = data.source_of(Job("bert-base", "d"))
    assert source.details[0] == "d: a document for each file, without its LICENSE, README.md"
    splits = source.load()
    read = [*splits.train["text"], *splits.validation["text"]]
    assert sorted(read) == ["A text of d/a.txt.", "A text of d/b.txt."]
    prose("d/a.ann", "d/b.ann")
    for model, language in (("bert-base", "masked-lm"), ("gpt2", "causal-lm")):
        said = refused(model, "d")
        assert said.startswith("d has more than texts, .ann; write a table, or learn the texts")
        assert said.endswith(f"--task {language}.")
    source = data.source_of(Job("bert-base", "d", task="masked-lm"))
    assert source.details[0] == "d: a document for each file, without its .ann, LICENSE, README.md"


ANIMALS = ("cat", "dog")
IMAGES = {  # folders of the classes -> rows of each split
    "sets": (("training_set", "test_set"), [7, 1, 8]),
    "all sets": (("train_data", "valid_data", "testData"), [8, 8, 8]),
    "unpacked": (("train/train", "test/test"), [7, 1, 8]),
    "by years": (("train2017", "val2017", "archive"), [8, 8, None]),
}


@pytest.mark.parametrize("case", IMAGES)
def test_splits_by_other_names(case):
    folders, sizes = IMAGES[case]
    for folder in folders:
        photos(Path("d", folder), classes=ANIMALS)
    assert loaded("d", "vit-micro") == (ANIMALS, sizes)


@pytest.mark.parametrize("names", [("fold1", "fold2"), ("cv_0", "cv_1"), ("part1", "part2")])
def test_folds_are_asked_for(names):
    for name in names:
        photos(Path("d", name), classes=ANIMALS)
    said = refused("vit-micro", "d")
    assert f"is called train, only {', '.join(names)}; name those to use with --split" in said
    assert loaded("d", "vit-micro", split=",".join(names)) == (ANIMALS, [8, 8, None])


def test_folders_in_classes_are_no_splits():
    for name in ANIMALS:
        photos(Path("d", name), classes=("day", "night"))
    assert loaded("d", "vit-micro", validation=0.25) == (ANIMALS, [12, 4, None])
    for name in ("class1", "class2"):
        photos(Path("e", name), classes=("images",))
    assert loaded("e", "vit-micro", validation=0.25)[0] == ("class1", "class2")


@pytest.mark.parametrize("name", ["__MACOSX", "@eaDir", ".thumbnails", "#recycle"])
def test_what_systems_leave_is_left_out(name):
    photos(Path("d"), classes=ANIMALS)
    for file in (f"{name}/cat/._0.jpg", f"cat/{name}/0.jpg", f"{name}/1.jpg", "cat/._1.jpg"):
        picture(Path("d", file))
    Path("d/Thumbs.db").touch()
    Path("d/dog/Thumbs.db").touch()
    source = data.source_of(Job("vit-micro", "d"))
    assert source.details[0] == "d: a folder for each class"
    assert loaded("d", "vit-micro", validation=0.25) == (ANIMALS, [6, 2, None])


def test_a_level_too_high_or_too_deep():
    photos(Path("d/animals"), classes=ANIMALS)
    said = refused("vit-micro", "d")
    assert "are in d/animals, which has the folders cat, dog; name that" in said
    assert loaded("d/animals", "vit-micro", validation=0.25) == (ANIMALS, [6, 2, None])
    said = refused("vit-micro", "d/animals/cat")
    assert said.endswith(f"name the folder around it, {Path.cwd()}/d/animals.")
    photos(Path("e/train/images"), classes=ANIMALS)
    assert "are in e/train/images, which has the folders cat, dog" in refused("vit-micro", "e")


def cached(folder):
    """Moves the files of a folder to where the hub's cache has them, with links instead."""
    top = Path("hub/datasets--a--b")
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link = top / "snapshots/1" / file.relative_to(folder)
        (top / "blobs").mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = file.rename(top / "blobs" / str(number))
        link.symlink_to(blob.absolute())
    return top / "snapshots/1"


def test_snapshots_of_the_hubs_cache():
    texts(Path("d/train.csv"))
    photos(Path("d/images"), classes=ANIMALS)
    files = [f"{c}/{i}.jpg,{c}" for c in ANIMALS for i in range(4)]
    table(Path("d/images/metadata.csv"), files, "file_name,label")
    snapshot = cached(Path("d"))
    job = Job("bert-base", data.place(str(snapshot / "train.csv")))
    assert job.dataset == str(Path.cwd() / snapshot / "train.csv")
    assert len(whole.labeled(job, "text", ("neg", "pos"))[0]) == 12
    assert loaded(str(snapshot / "images"), "vit-micro", validation=0.25) == (ANIMALS, [6, 2, None])
    Path("secret.jpg").write_bytes(b"")
    (snapshot / "images/cat/0.jpg").unlink()
    (snapshot / "images/cat/0.jpg").symlink_to(Path("secret.jpg").absolute())
    refuses(DataError, "outside the folder of its table", "vit-micro", str(snapshot / "images"))


def test_places_of_data_keep_links():
    texts(Path("real/data/a.csv"))
    Path("link").symlink_to("real/data")
    assert data.place("link/a.csv") == f"{Path.cwd()}/link/a.csv"
    assert data.place("real/../link/a.csv") == f"{Path.cwd()}/link/a.csv"
    assert Path(data.place("link/../data/a.csv")).samefile("real/data/a.csv")
