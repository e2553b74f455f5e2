"""Rows that are held out for validation."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from razorctl import data
from razorctl.config.job import Job
from razorctl.data import own
from razorctl.data.own import in_memory
from razorctl.data.own.held_out import limited, stratified
from razorctl.errors import UsageError
from tests.own import photos


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.floats(0.01, 0.9),
    st.integers(0, 2**32 - 1),
)
def test_each_class_gives_its_share_and_keeps_a_row(labels, share, seed):
    found = stratified(np.array(labels), share, seed)
    assert list(found) == sorted(set(found))
    counts, taken = Counter(labels), Counter(labels[row] for row in found)
    for label, count in counts.items():
        assert taken[label] <= count - 1
        assert taken[label] <= int(share * count) + 1
        assert taken[label] > share * count - 1 or taken[label] == count - 1
    most = sum(min(int(share * n) + 1, n - 1) for n in counts.values())
    assert len(found) == min(max(1, round(share * len(labels))), most)


def test_a_tenth_of_a_thousand_rows():
    labels = np.repeat([0, 1, 2], [700, 200, 100])
    found = stratified(labels, 0.1, 3)
    assert np.bincount(labels[found]).tolist() == [70, 20, 10]
    assert (found == stratified(labels, 0.1, 3)).all()
    assert (found != stratified(labels, 0.1, 4)).any()
    assert np.ptp(found[:70]) > 500  # not the first or last rows of a class


@pytest.mark.parametrize("share", [0, 0.1])
def test_nothing_is_taken_of_no_share_or_of_single_rows(share):
    labels = np.arange(9) if share else np.zeros(9, int)
    assert len(stratified(labels, share, 0)) == 0


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
)
def test_of_limited_rows_each_class_has_its_share(labels, most, seed):
    found = limited(np.array(labels), most, seed)
    assert list(found) == sorted(set(found))
    assert len(found) == min(most, len(labels))
    counts, kept = Counter(labels), Counter(labels[row] for row in found)
    if most >= len(counts):
        share = min(1, most / len(labels))
        assert all(kept[label] >= max(1, int(share * n)) for label, n in counts.items())


def test_limited_rows_depend_on_the_seed():
    labels = np.zeros(100, int)
    assert (limited(labels, 9, 1) == limited(labels, 9, 1)).all()
    assert (limited(labels, 9, 1) != limited(labels, 9, 2)).any()
    assert limited(labels, None, 1).tolist() == [*range(100)]


def _table(kind: str) -> str:
    """40 rows with a text and a label, in a table, in memory, or in a folder of images."""
    if kind == "folder":
        return str(photos(Path("photos"), 14))
    rows = pd.DataFrame({"text": [f"text {i}" for i in range(40)], "label": ["a", "b"] * 20})
    if kind == "memory":
        return str(in_memory.stored(rows))
    rows.to_csv("rows.csv", index=False)
    return "rows.csv"


@pytest.mark.parametrize("kind", ["table", "memory", "folder"])
def test_held_out_rows_do_not_depend_on_the_limit(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job("vit-micro" if kind == "folder" else "bert-base", _table(kind))
    every, few = (own.find(replace(job, max_rows=most)) for most in (None, 9))
    assert (few.train_examples, few.evaluated_examples) == (9, every.evaluated_examples)
    assert "9 rows to train on, 4 held out for validation" in few.details
    every, few = every.load(), few.load()
    name = "image" if kind == "folder" else "text"
    taken = [[str(row[name]) for row in splits.train] for splits in (few, every)]
    assert len(few.train) == 9
    assert kind == "folder" or {*taken[0]} < {*taken[1]}
    assert few.record == every.record
    assert few.digests["validation"] == every.digests["validation"]
    assert few.digests["train"] != every.digests["train"]
    assert few.digests == own.find(replace(job, max_rows=9)).load().digests
    assert own.find(replace(job, max_rows=10**6)).load().digests == every.digests


def test_a_registered_set_is_limited_too():
    source = data.source_of(Job("vit-micro", "digits", max_rows=30, seed=1))
    splits, every = source.load(), data.DATASETS["digits"].load()
    assert source.train_examples == len(splits.train) == 30
    assert Counter(splits.train["label"]).keys() == {*range(10)}
    assert len(splits.test) == len(every.test)


def test_rows_of_a_single_text_cannot_be_left_out(tmp_path):
    (tmp_path / "book.txt").write_text("one line\n" * 50)
    for name in (str(tmp_path / "book.txt"), "wikitext2"):
        with pytest.raises(UsageError, match=r"has one text to train on, .*give --steps"):
            data.source_of(Job("gpt2", name, max_rows=5))
