import dataclasses
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from razorctl import data
from razorctl.config.job import Job, resolve_precision
from razorctl.errors import UsageError

POSITIVE = (
    "input_size",
    "batch_size",
    "steps",
    "epochs",
    "learning_rate",
    "clip_norm",
    "max_rows",
    "evaluate_every",
    "processes",
)


def test_given_values_win_over_the_models_and_those_over_ours():
    job = Job("m", "d", steps=50).resolved({"steps": 10, "evaluate_every": 3}, 1000)
    assert (job.steps, job.evaluate_every, job.batch_size) == (50, 3, 64)
    settled = ("learning_rate", "weight_decay", "warmup_steps", "clip_norm", "precision", "augment")
    assert None not in [getattr(job, name) for name in settled]
    assert (job.epochs, job.patience, job.ema, job.task) == (None,) * 4


def test_learning_rate_and_weight_decay_are_those_for_the_optimizer():
    def rates(defaults, **given):
        job = Job("m", "d", **given).resolved(defaults, 1000)
        return job.learning_rate, job.weight_decay

    own = {"sgd": {"learning_rate": 0.3}, "adamw": {"learning_rate": 2e-5, "weight_decay": 0.05}}
    assert rates(own) == (0.3, 0)
    assert rates(own, optimizer="adamw") == (2e-5, 0.05)
    assert rates(own, optimizer="adamw", learning_rate=0.1, weight_decay=0.0) == (0.1, 0)
    assert rates({"sgd": own["sgd"]}, optimizer="adamw") == (1e-4, 0.01)  # no figure of its own


@pytest.mark.parametrize(("part", "factor"), [("adapters", 3), ("bias", 10), ("head", 10)])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_part_that_is_trained_alone_has_a_learning_rate_of_its_own(optimizer, part, factor):
    own = {"adamw": {"learning_rate": 2e-5}, "sgd": {"learning_rate": 0.2}}
    job = Job("m", "d", optimizer=optimizer)
    assert job.resolved(own, 1000, part).learning_rate == pytest.approx(2e-5 * factor)
    assert Job("m", "d", optimizer="sgd").resolved(own, 1000, part).learning_rate == 0.2
    given = dataclasses.replace(job, learning_rate=0.1)
    assert given.resolved(own, 1000, part).learning_rate == 0.1


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (0.25, 3), (3, 30), (0.001, 1)])
def test_epochs_become_steps(epochs, steps):
    job = Job("m", "d", batch_size=100, epochs=epochs).resolved({"steps": 7}, 1050)
    assert job.steps == steps
    assert job.epochs is None


def test_an_activation_memory_budget_is_of_compiled_steps():
    assert Job("m", "d", compile=True, activation_memory_budget=1.0).activation_memory_budget == 1
    with pytest.raises(UsageError, match="add --compile, or leave --activation-memory-budget out"):
        Job("m", "d", activation_memory_budget=0.1)


def test_epochs_of_a_model_give_way_to_what_is_given():
    def steps(**given):
        return Job("m", "d", batch_size=10, **given).resolved({"epochs": 5}, 100).steps

    assert (steps(), steps(epochs=2), steps(steps=7)) == (50, 20, 7)


def test_a_batch_larger_than_the_data_is_refused():
    assert Job("m", "d", batch_size=10).resolved({}, 10).batch_size == 10
    with pytest.raises(UsageError, match="batch size 11 is larger than the 10 training examples"):
        Job("m", "d", batch_size=11).resolved({}, 10)


@pytest.mark.parametrize("field", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_must_be_positive(field, value):
    with pytest.raises(UsageError, match=r"positive|not of type"):
        Job("m", "d", **{field: value})


@pytest.mark.parametrize(
    "field",
    [
        *("momentum", "weight_decay", "warmup_steps", "mixup", "cutmix", "label_smoothing"),
        *("patience", "workers"),
    ],
)
def test_what_must_not_be_negative(field):
    Job("m", "d", **{field: 0})
    with pytest.raises(UsageError, match="negative"):
        Job("m", "d", **{field: -1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_decay": 1.5}, "layer decay 1.5 is above 1"),
        ({"label_smoothing": 1.0}, "leaves nothing of a label"),
        ({"max_ratio": 1.0}, r"max ratio 1.0 is outside \[0, 1\); give one"),
        ({"validation": 1.0}, r"validation 1.0 is outside \[0, 1\); give a share"),
        ({"activation_memory_budget": 0.0}, r"budget 0.0 is outside \(0, 1\]; give a share"),
        ({"activation_memory_budget": 1.5}, r"budget 1.5 is outside \(0, 1\]; give a share"),
        ({"class_weights": "balance"}, "are neither 'balanced' nor numbers; give one for each"),
        ({"class_weights": "1,nan"}, "class weight nan is not a positive number; give one for"),
        ({"class_weights": "0,1"}, "class weight 0 is not a positive number"),
        *(({"ema": decay}, r"is outside \(0, 1\); give a decay") for decay in (0.0, 1.0, math.nan)),
        ({"ema": 0.9, "processes": 2, "strategy": "fsdp"}, "cannot be sharded over processes"),
        ({"ema": 0.9, "weights": "bf16"}, "choose --weights fp32, or leave --ema out"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'"),
        ({"augment": "crops"}, "unknown augment 'crops'; did you mean 'crop'"),
    ],
)
def test_what_is_beyond_its_range(settings, message):
    with pytest.raises(UsageError, match=message):
        Job("m", "d", **settings)


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (
            ("vit-micro", "digits"),
            "1,2",
            "digits has 10 classes, not 2; give a class weight for each",
        ),
        (("gpt2", "wikitext2"), "balanced", "wikitext2 is for causal-lm"),
    ],
)
def test_class_weights_are_those_of_the_classes(names, weights, message):
    with pytest.raises(UsageError, match=message):
        data.check(Job(*names, class_weights=weights))


@pytest.mark.parametrize("settings", [{"augment": "crop"}, {"mixup": 0.1}, {"cutmix": 1.0}])
def test_texts_are_not_augmented(settings):
    with pytest.raises(UsageError, match="bert-base takes texts, which are not augmented"):
        data.check(Job("bert-base", "rte", **settings))
    data.check(Job("bert-base", "rte", augment="none", label_smoothing=0.1))


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(UsageError, match="one of them"):
        Job("m", "d", steps=1, epochs=1)


def test_schedule_rises_then_falls_to_zero():
    job = Job("m", "d", steps=100, warmup_steps=10).resolved({}, 1000)
    shares = [job.decay(step) for step in range(101)]
    assert shares[:11] == pytest.approx([(i + 1) / 11 for i in range(11)])
    assert all(a >= b for a, b in pairwise(shares[10:]))
    assert shares[55] == pytest.approx(0.5)
    assert shares[100] == pytest.approx(0)
    single = Job("m", "d", steps=1, warmup_steps=0).resolved({}, 1000)
    assert single.decay(0) == 1


@pytest.mark.parametrize(
    ("schedule", "after"), [("linear", [1 - i / 90 for i in range(91)]), ("constant", [1.0] * 91)]
)
def test_other_schedules_rise_alike(schedule, after):
    job = Job("m", "d", steps=100, warmup_steps=10).resolved({}, 1000)
    other = replace(job, schedule=schedule)
    assert [other.decay(step) for step in range(10)] == [job.decay(step) for step in range(10)]
    assert [other.decay(step) for step in range(10, 101)] == pytest.approx(after)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 2.5),
        ("batch_size", "64"),
        ("steps", True),
        ("seed", None),
        ("precision", None),
    ],
)
def test_values_of_another_type_are_refused(field, value):
    with pytest.raises(UsageError, match=rf"{field.replace('_', ' ')} {value!r} is not of type"):
        Job("m", "d", **{field: value})


@pytest.mark.parametrize(
    ("capability", "auto"), [("9.0", "bf16"), ("8.0", "bf16"), ("7.5", "fp16"), ("6.1", "fp32")]
)
def test_precision_by_capability(capability, auto):
    assert resolve_precision("auto", capability) == auto
    assert resolve_precision("fp32", capability) == "fp32"
    assert resolve_precision("fp16", capability) == "fp16"
    if auto == "bf16":
        assert resolve_precision("bf16", capability) == "bf16"
    else:
        with pytest.raises(UsageError, match=r"needs compute capability 8.0, .* choose fp16"):
            resolve_precision("bf16", capability)
