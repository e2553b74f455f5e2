"""Sets of the hub for other tasks than classification, from small local copies."""

from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset, Image
from PIL import Image as Pictures

from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own.read import hub as hubs
from tests import local_hub

CARD = """---
dataset_info:
  features:
{features}
  splits:
  - name: train
    num_examples: 10
  - name: test
    num_examples: 4
configs:
- config_name: default
  data_files:
  - split: train
    path: train.parquet
  - split: test
    path: test.parquet
---
"""
TEXT = "  - name: text\n    dtype: string"
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
MESSAGES = """  - name: messages
    list:
    - name: role
      dtype: string
    - name: content
      dtype: string"""
ROWS = {
    "text": lambda count: {"text": [f"a text {i}" for i in range(count)]},
    "messages": lambda count: {"messages": [TALK] * count},
}
FEATURES = {"text": TEXT, "messages": MESSAGES}


def cached(hub, columns, card=""):
    def write(snapshot):
        for split, count in {"train": 10, "test": 4}.items():
            rows = Dataset.from_dict(columns(count))
            for column in {"image", "annotation"} & {*rows.column_names}:
                rows = rows.cast_column(column, Image())
            rows.to_parquet(snapshot / f"{split}.parquet")
        (snapshot / "README.md").write_text(card)

    local_hub.cache(hub, "dataset", "some/set", write)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("card", [True, False], ids=["with a card", "without"])
def test_language_modelling(kind, card, hub, monkeypatch):
    cached(hub, ROWS[kind], CARD.format(features=FEATURES[kind]) if card else "")
    job = Job("any", "hf:some/set", task="causal-lm")
    read, real = [], hubs.hub_rows
    monkeypatch.setattr(hubs, "hub_rows", lambda job, *more: read.append(job) or real(job, *more))
    source = data.source_of(job)
    assert bool(read) == (not card)  # with a card nothing is read before it is loaded
    assert (source.task, source.classes) == ("causal-lm", 0)
    assert source.train_examples == (None if kind == "text" else 9)
    assert source.details[2] == "9 rows to train on, 1 held out for validation, 4 for test"
    splits = source.load()
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (9, 1, 4)
    assert splits.train.column_names == [kind]
    few = data.source_of(replace(job, max_rows=5))
    assert few.details[2] == "5 rows to train on, 1 held out for validation, 4 for test"
    assert few.load().validation[:] == splits.validation[:]


def test_a_card_that_other_columns_may_gainsay_is_not_enough(hub):
    """A column of few values may be the label, which the card does not tell."""
    both = {"text": [f"a text {i}" for i in range(10)], "mood": ["good", "bad"] * 5}
    card = CARD.format(features=f"{TEXT}\n  - name: mood\n    dtype: string")
    cached(hub, lambda count: {name: values[:count] for name, values in both.items()}, card)
    assert data.source_of(Job("bert-base", "hf:some/set")).task == "classification"


def test_segmentation(hub):
    def columns(count):
        mask = Pictures.fromarray(np.tile(np.uint8([0, 1, 2, 255]), (3, 1)))
        images = [Pictures.new("RGB", (4, 3), (9 * i, 0, 0)) for i in range(count)]
        return {"image": images, "annotation": [mask] * count, "scene": ["x"] * count}

    cached(hub, columns)
    source = data.source_of(Job("any", "hf:some/set", task="segmentation"))
    assert (source.task, source.modality, source.classes) == ("segmentation", "image", 3)
    splits = source.load()
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (9, 1, 4)
    assert splits.test[1].keys() == {"image", "mask"}
    assert splits.test[1]["mask"].getextrema() == (0, 255)
