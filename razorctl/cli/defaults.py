"""The default training settings of a model on a data set, and where each comes from."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from razorctl import data, models
from razorctl.config.job import BY_ROWS, GENERAL, Job

# Fields of a job that are shown, in this order.
SETTINGS = (
    *("batch_size", "epochs", "steps", "optimizer", "learning_rate", "weight_decay", "momentum"),
    *("layer_decay", "schedule", "warmup_steps", "clip_norm", "evaluate_every", "patience"),
    *("metric", "augment", "mixup", "cutmix", "label_smoothing", "input_size", "precision"),
)


def defaults_of(model: str, dataset: str | None) -> dict[str, Any]:
    """The defaults of a model on a data set, as rows of setting, value and from.

    `from` is "model", "data" or "general". `rows` is the number of training examples; it and values
    that follow from it are None for texts, which are not tokenized here.
    Raises what `data.pair` raises.

    dataset: None is the usual one of the model.
    """
    if dataset is None:
        entry = models.named(model)
        dataset = data.usual(entry.tasks[0], entry.modality)
    job = Job(model, dataset)
    family, source = data.pair(job)
    rows = source.train_examples
    values = asdict(job.resolved(family.defaults, rows))
    if rows is not None and values["epochs"] is None:
        values["epochs"] = values["steps"] / (rows // values["batch_size"])
    of_model = models.find(model, source.task).defaults
    table = [
        {"setting": name, "value": values[name], "from": _origin(name, values, family, of_model)}
        for name in SETTINGS
        if name != "momentum" or values["optimizer"] == "sgd"
    ]
    return {"model": model, "dataset": dataset, "rows": rows, "defaults": table}


def _origin(
    name: str, values: Mapping[str, Any], family: models.Model, of_model: Mapping[str, Any]
) -> str:
    """Where a value comes from; of_model: the model's defaults for any data."""
    by_optimizer = family.defaults.get(values["optimizer"].removesuffix("8bit"), {})
    if name == "metric":
        return "data"
    if BY_ROWS in family.defaults and (
        name in data.LENGTH
        or name == "patience"
        or (name == "batch_size" and values[name] != of_model.get(name, GENERAL[name]))
        or (name == "augment" and name not in of_model)
    ):
        return "data"
    if name in ("epochs", "steps"):
        return "model" if {"epochs", "steps"} & of_model.keys() else "general"
    if name == "input_size" or name in by_optimizer or name in of_model:
        return "model"
    return "general"
