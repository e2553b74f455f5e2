"""Cached traces of a job's training steps."""

from dataclasses import asdict, replace
from typing import Any

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.memory import trace_cache as traces
from razorctl.memory.trace_cache import Trace


def job_facts(job: Job) -> dict[str, Any]:
    """The facts about a job's model and data set that planning needs.

    Returns `defaults`, the model's settings of a Job; the numbers of `classes` and
    `train_examples`; the `lengths` of texts; and whether an encoder `classifies_texts`. Raises
    UsageError for unknown names and for a data set that the model cannot take, and DataError for a
    data set that cannot be used.
    """
    from razorctl import data, models
    from razorctl.data.own import text_lengths

    family, source = data.pair(job)
    encodes = "masked-lm" in models.named(job.model).tasks
    return {
        "defaults": dict(family.defaults),
        "classes": source.classes,
        "train_examples": source.train_examples,
        "lengths": text_lengths.sample_lengths(job, family, source),
        "classifies_texts": encodes and family.task == "classification",
    }


def trace_key(job: Job, recipe: Recipe, classes: int) -> list[Any]:
    """The key of the trace of a step, a JSON value; similar jobs share it."""
    from razorctl import models

    return [
        *(job.model, models.stamp(job.model), job.from_scratch),
        *(job.task, classes, job.input_size, job.micro_batch),
        *(job.accumulate, job.buckets, job.packing),
        *(job.precision, job.optimizer, bool(job.momentum), bool(job.weight_decay)),
        *(job.weights, job.optimizer_in_backward, job.optimizer_state),
        *(job.class_weights is not None, job.pooling, job.symmetric),
        *(job.ema is not None, job.freeze, job.compile),
        # CUDA graphs keep gradients in memory.
        bool(job.cuda_graphs and job.compile and job.accumulate > 1),
        asdict(replace(recipe, seed=0)),
    ]


def weight_count(job: Job, classes: int, cache: traces.Cache) -> int:
    """The number of weights of a resolved job's model that can be trained, cached."""
    from razorctl import models

    name = "weights", job.model, models.stamp(job.model), job.task, classes, job.input_size
    count: int | None = cache.get(*name)
    if count is None:
        from razorctl.planning import job_trace as tracing  # imports torch

        model, *_ = tracing.blueprint(job, classes)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        cache.put(count, *name)
    return count


def cached_trace(
    job: Job,
    recipe: Recipe,
    classes: int,
    cache: traces.Cache,
    device: str = "cuda",
    dot: bool = True,
) -> Trace:
    """The trace of a training step, cached.

    Raises UsageError for a recipe that the model cannot take.

    Args:
        job: a resolved job.
        recipe: its recipe.
        classes: number of classes of its data set.
        cache: where the trace is looked up and stored.
        device: the kind of device.
        dot: see `ops.kernels.assumed`.
    """
    step = [*trace_key(job, recipe, classes), device, dot]
    document = cache.get("trace", *step)
    if document is None:
        from razorctl.planning import job_trace as tracing  # imports torch

        try:
            document = traces.dump(tracing.trace(job, recipe, classes, device, dot))
        except UsageError as error:
            document = {"refused": str(error)}
        cache.put(document, "trace", *step)
    if "refused" in document:
        raise UsageError(document["refused"])
    return traces.load(document)
