"""Runs on texts, whose batches are as long as their longest text."""

import shutil
from dataclasses import replace

import pytest

from razorctl import data, models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory.saved import traced_bytes
from tests import local_hub
from tests.training.runs import begin, resume, same

JOB = Job("bert-base", "rte", batch_size=4, steps=3, save_every=1, accumulate=2)


@pytest.fixture(autouse=True)
def rte(hub, monkeypatch):
    """A table of texts, the longest of about 160 tokens."""
    monkeypatch.setitem(models.models(), "bert-base", local_hub.ENTRIES["bert-base"])
    local_hub.cache_model(hub, "bert-base")
    local_hub.cache_data(hub, data.find("rte"), count=40)


def lengths(run):
    """The tokens of the micro-batches of three steps."""
    steps = run.feed.loading.batches()
    return [rows["inputs"]["input_ids"].shape[1] for _ in range(3) for rows in next(steps)]


@pytest.mark.parametrize("size", [24, 128])
def test_no_step_saves_more_than_is_traced(size, tmp_path):
    job = replace(JOB, input_size=size)
    run = begin(tmp_path / "run", job, Recipe("razor"))
    largest = models.find("bert-base").example(run.model, 2, size)
    assert run.saved_bytes == traced_bytes(run.model, largest)
    for rows in next(run.feed.loading.batches()):
        assert traced_bytes(run.model, rows["inputs"]) <= run.saved_bytes
    found = lengths(run)
    assert max(found) <= size
    assert min(found) < max(found) or size == 24  # where almost all texts are cut
    assert all(tokens % 8 == 0 for tokens in found)
    told = [note for note in run.notes if "longer than the input size and cut; a larger" in note]
    assert len(told) == (size == 24)


def test_compiled_steps_have_one_shape_and_evaluations_need_none(tmp_path):
    run = begin(tmp_path / "run", replace(JOB, compile=True))
    assert set(lengths(run)) == {128}
    small = next(iter(run.feed.evaluated))["inputs"]["input_ids"]
    assert small.shape[1] < 128


@pytest.mark.parametrize("method", ["prebackrazor++", "razor"])
def test_a_run_on_texts_of_all_lengths_goes_on_with_the_same_bits(method, tmp_path, caplog):
    recipe = Recipe(method, 0.8)
    run = begin(tmp_path / "run", JOB, recipe, steps=1)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    assert len(set(lengths(run))) > 2
    list(run)
    assert "the classifier of bert-base is new" in caplog.text
    caplog.clear()
    list(resume(tmp_path / "again", JOB, recipe))
    assert "is new" not in caplog.text  # which the run said when it began
    assert same(tmp_path / "again/model.safetensors", tmp_path / "run/model.safetensors")
