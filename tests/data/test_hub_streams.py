"""Sets of the hub that are read as they come, from a server that says what was asked for."""

from dataclasses import replace
from functools import partial

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from huggingface_hub import constants

from razorctl import data, models
from razorctl.errors import DataError, MissingError, UsageError
from razorctl.job import Job
from tests import hub_server, local_hub, own
from tests.data.test_streaming import jpeg
from tests.training.runs import begin, resume, same, stop

JOB = Job("bert-base", "hf:films/films", batch_size=4, steps=4, save_every=1, streaming=True)
CARD = hub_server.CARD.format(text="text", rows=20, tested=6)


def films(snapshot, card="", named=True):
    for split, count in {"train-0": 10, "train-1": 10, "test-0": 6}.items():
        rows = {
            "text": [f"a film {split} {i}" for i in range(count)],
            "label": [0, 1] * (count // 2),
        }
        found = Dataset.from_dict(rows)
        kinds = ClassLabel(names=["bad", "good"])
        found = found.cast_column("label", kinds) if named else found
        found.to_parquet(snapshot / f"{split}.parquet")
    (snapshot / "README.md").write_text(card)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """datasets waits for seconds at the end of each epoch."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1)


@pytest.mark.parametrize("card", [CARD, ""], ids=["with a card", "without"])
def test_nothing_is_kept_of_what_is_streamed(card, server, hub):
    local_hub.cache(server, "dataset", "films/films", partial(films, card=card))
    source = data.of(JOB)
    known = (20, 6) if card else (None, None)
    assert (source.classes, source.train_examples, source.test_examples) == (2, *known)
    assert source.details[2].startswith("20 rows" if card else "an unknown number of rows")
    splits = source.load()
    assert splits.classes == ("bad", "good")
    rows = [row.values for row in splits.train.in_order()]
    assert rows[10] == {"text": "a film train-1 0", "label": 0}
    assert len(rows) == 20
    shuffled = [row.values["text"] for row in splits.train.shuffled(0, 1)]
    assert sorted(shuffled) == sorted(row["text"] for row in rows)
    assert shuffled != [row["text"] for row in rows]
    assert not list(hub.parent.rglob("*.parquet"))


def test_a_run_goes_on_with_the_same_bits(server, hub, tmp_path, monkeypatch):
    monkeypatch.setitem(models.models(), "bert-base", local_hub.ENTRIES["bert-base"])
    local_hub.cache_model(server, "bert-base")
    local_hub.cache(server, "dataset", "films/films", films)
    list(begin(tmp_path / "run", JOB))
    stop(begin(tmp_path / "again", JOB, steps=3))
    list(resume(tmp_path / "again", JOB))
    assert same(tmp_path / "again/model.safetensors", tmp_path / "run/model.safetensors")


def test_images_are_decoded_only_when_used(server):
    def write(snapshot):
        kinds = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
        for split in ("train", "validation"):
            image = [{"bytes": jpeg(9 * i), "path": None} for i in range(6)]
            image[4] = {"bytes": None, "path": "/etc/passwd"} if split == "train" else image[4]
            Dataset.from_dict({"image": image, "label": [0, 1] * 3}, kinds).to_parquet(
                snapshot / f"{split}.parquet"
            )

    local_hub.cache(server, "dataset", "films/films", write)
    splits = data.of(replace(JOB, model="vit-micro", skip_bad=True)).load()
    micro = models.find("vit-micro")
    rows = splits.validation.with_transform(micro.transform(micro.bare(2), None))
    reads = list(rows.in_order())
    assert reads[2].values["image"] == jpeg(18)
    assert rows.transformed[reads[2]]["inputs"].shape == (1, 28, 28)
    with pytest.raises(DataError, match="name images by paths inside the folder"):
        list(splits.train.in_order())


def stills(snapshot):
    own.photos(snapshot / "train")
    own.photos(snapshot / "test")


def lone(snapshot):
    films(snapshot)
    (snapshot / "test-0.parquet").unlink()


REFUSED = {
    "labels without names": (
        partial(films, named=False),
        UsageError,
        "column label of hf:films/films does not name its classes, which must be known before",
    ),
    "no validation": (lone, UsageError, "hf:films/films has no validation or test split"),
    "a file for each image": (stills, DataError, "has a file for each image, which cannot be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_streamed_is_refused(case, server):
    write, kind, message = REFUSED[case]
    local_hub.cache(server, "dataset", "films/films", write)
    with pytest.raises(kind, match=message):
        data.of(JOB)


def test_steps_are_needed_if_the_rows_are_not_counted(server):
    local_hub.cache(server, "dataset", "films/films", films)
    with pytest.raises(UsageError, match="rows of hf:films/films is not known before they are st"):
        data.check(replace(JOB, steps=None, epochs=1.0))


def test_a_hub_that_does_not_answer_any_more(server, faults):
    local_hub.cache(server, "dataset", "films/films", partial(films, card=CARD))
    rows = data.of(JOB).load().train
    faults.gated = True
    with pytest.raises(DataError, match=r"train of hf:films/films cannot be read on \("):
        list(rows.in_order())


@pytest.mark.parametrize("card", [CARD, ""], ids=["with a card", "without"])
def test_without_the_hub_nothing_is_streamed(card, server, monkeypatch):
    local_hub.cache(server, "dataset", "films/films", partial(films, card=card))
    data.of(JOB)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match="hf:films/films cannot be streamed from the hub"):
        data.of(JOB)


def test_a_test_split_of_a_contest_is_not_used(server):
    def write(snapshot):
        for split, labels in {"train": [0, 1], "validation": [1, 0], "test": [-1, -1]}.items():
            rows = Dataset.from_dict({"text": ["a b"] * 2, "label": labels})
            rows = rows.cast_column("label", ClassLabel(names=["no", "yes"]))
            rows.to_parquet(snapshot / f"{split}.parquet")

    local_hub.cache(server, "dataset", "films/films", write)
    splits = data.of(JOB).load()
    assert (splits.test, splits.evaluated[0]) == (None, "validation")
    asked = data.of(replace(JOB, split="train,validation,test")).load()
    with pytest.raises(DataError, match=r"test, row 0 as it is read .no label"):
        list(asked.test.in_order())
