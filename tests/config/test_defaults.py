"""Defaults that follow from the rows of one's own data, and how they reach a run."""

import math

import pytest

from razorctl.config.defaults import EPOCHS, ByRows, whole_batch
from razorctl.config.job import BY_ROWS, Job
from razorctl.config.settings import read_toml
from razorctl.errors import UsageError
from razorctl.training.run import finetune
from tests.drawings import shapes

IMAGES = ByRows("classification", "image", validated=True, evaluated=20)


def resolved(rows: int | None, by_rows: ByRows = IMAGES, **given: object) -> Job:
    return Job("m", "d", **given).resolved({"batch_size": 128, BY_ROWS: by_rows}, rows)


def test_more_rows_are_passed_fewer_times():
    for table in EPOCHS.values():
        most, epochs = zip(*table, strict=True)
        assert list(most) == sorted(most)
        assert list(epochs) == sorted(epochs, reverse=True)
        assert most[-1] == math.inf
        assert max(epochs) <= 100  # beyond which a run is said to be long


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"),
    [(30, 8, 30), (180, 16, 30), (1000, 64, 30), (10_000, 128, 10), (1_000_000, 128, 3)],
)
def test_rows_say_how_many_epochs_and_how_large_a_batch(rows, batch, epochs):
    job = resolved(rows)
    assert (job.batch_size, job.steps) == (batch, epochs * (rows // batch))
    assert job.warmup_steps == min(500, job.steps // 10)


def test_five_rows_are_a_batch_unless_a_larger_one_is_asked_for():
    assert resolved(5).batch_size == 5
    with pytest.raises(UsageError, match="batch size 128 is larger than the 5 training examples"):
        resolved(5, batch_size=128)


def test_a_batch_that_nobody_gave_can_be_split():
    assert resolved(30, accumulate=3).batch_size == 6
    assert resolved(30, processes=2, accumulate=2, mixup=0.2).batch_size == 8
    assert whole_batch(64, None, 3) == 63
    with pytest.raises(UsageError, match="batch size 8 is larger than the 5"):
        resolved(5, processes=8)


def test_what_is_given_stays():
    job = resolved(180, batch_size=60, epochs=2, evaluate_every=1, warmup_steps=0, patience=7)
    assert (job.batch_size, job.steps, job.evaluate_every) == (60, 6, 1)
    assert (job.warmup_steps, job.patience) == (0, 7)


@pytest.mark.parametrize(
    ("steps", "every"),
    # Of 10 steps an epoch: parts of one, each one, each second one.
    [(10, 2), (30, 5), (60, 10), (200, 10), (210, 20), (400, 20)],
)
def test_five_to_twenty_evaluations_at_whole_epochs_or_equal_parts(steps, every):
    assert resolved(100, batch_size=10, steps=steps).evaluate_every == every


def test_rows_that_are_evaluated_do_not_outweigh_those_that_are_trained():
    many = ByRows("classification", "image", validated=True, evaluated=3000)
    job = resolved(200, many, batch_size=20, epochs=30)
    assert math.ceil(300 / job.evaluate_every) == 2  # 6,000 rows each
    assert resolved(200, many, batch_size=20, epochs=1).evaluate_every == 10


def test_patience_is_of_runs_of_no_given_length_with_a_validation_split():
    job = resolved(180)
    assert job.patience == math.ceil(math.ceil(job.steps / job.evaluate_every) / 2)
    assert resolved(180, ByRows("classification", "image")).patience is None
    assert resolved(180, steps=100).patience is None
    assert resolved(180, epochs=100.0).patience is None
    assert resolved(180, patience=0).patience == 0


def test_images_that_a_run_takes_once_are_not_augmented():
    defaults = {"batch_size": 128, "augment": "crop"}  # 11 batches of 16 are an epoch
    for given, augment in (
        ({"steps": 11}, "none"),
        ({"epochs": 1.0}, "none"),
        ({"steps": 12}, "crop"),
        ({"steps": 11, "augment": "crop"}, "crop"),
        ({}, "crop"),
    ):
        assert (
            Job("m", "d", **given).resolved({**defaults, BY_ROWS: IMAGES}, 180).augment == augment
        )
    assert Job("m", "d", steps=1).resolved(defaults, 180).augment == "crop"  # as in its paper


def test_a_resolved_job_stays_as_it_is():
    for rows in (5, 180, 10_000):
        for given in ({}, {"steps": 7}, {"epochs": 2.5}, {"patience": 0}):
            job = resolved(rows, **given)
            assert job.resolved({"batch_size": 128, BY_ROWS: IMAGES}, rows) == job


def test_the_length_stays_open_where_tokenizing_will_tell_it():
    texts = ByRows("causal-lm", "text", validated=True)
    job = resolved(None, texts)
    assert (job.steps, job.epochs, job.warmup_steps, job.patience) == (None, None, None, None)
    assert resolved(None, texts, epochs=2).epochs == 2
    assert resolved(None, texts, steps=9).evaluate_every == 2
    assert resolved(40, texts).steps == 3 * 5


def test_a_run_writes_every_default_and_repeats_it(tmp_path):
    """The job in config.toml, read again, is the job of the run, whatever else is a default."""
    folder = str(shapes(tmp_path / "drawings", 30))
    run = finetune(Job("vit-micro", folder), out=tmp_path / "run", device="cpu")
    run.lock.release()
    written = read_toml(tmp_path / "run/config.toml")["job"]
    wanted = {"batch_size": 8, "steps": 270, "optimizer": "sgd", "learning_rate": 0.1}
    wanted |= {"weight_decay": 0.0, "warmup_steps": 27, "evaluate_every": 15, "patience": 9}
    wanted |= {"augment": "crop", "metric": "accuracy", "precision": "fp32"}
    assert wanted.items() <= written.items()
    assert "epochs" not in written
    again = finetune(Job(**written), out=tmp_path / "again", device="cpu")
    again.lock.release()
    assert again.job == run.job
    assert (run.steps_per_epoch, run.usual_epochs) == (3, 90)
