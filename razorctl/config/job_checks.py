"""Checks of the values of a `Job`: bounds, settings that exclude each other, split batches.

The type of a job is Any, since `job` imports this file.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from razorctl import units
from razorctl.config import mask_classes
from razorctl.errors import UsageError

BALANCED = "balanced"  # class weights that are computed from the rows


class _Bound(NamedTuple):
    """Fields, the condition that refuses a value, and the error."""

    fields: tuple[str, ...]
    refused: Callable[[float], bool]
    error: str


BOUNDS = (
    _Bound(
        (
            *("input_size", "batch_size", "accumulate", "processes", "steps", "epochs"),
            *("learning_rate", "layer_decay", "clip_norm", "evaluate_every", "save_every"),
            *("temperature", "max_rows"),
        ),
        lambda value: not 0 < value < math.inf,
        "{name} {value} is not a positive number; give one.",
    ),
    _Bound(
        ("layer_decay",),
        lambda factor: factor > 1,
        "{name} {value:g} is above 1; give one such as 0.75.",
    ),
    _Bound(
        ("label_smoothing",),
        lambda share: share >= 1,
        "{name} {value:g} leaves nothing of a label; give less than 1.",
    ),
    _Bound(
        (
            *("momentum", "weight_decay", "warmup_steps", "mixup", "cutmix", "label_smoothing"),
            *("patience", "workers"),
        ),
        lambda value: not 0 <= value < math.inf,
        "{name} {value} is negative or not finite; give 0 or more.",
    ),
    _Bound(
        ("ema",),
        lambda decay: not 0 < decay < 1,
        "{name} {value} is outside (0, 1); give a decay such as 0.999.",
    ),
    _Bound(
        ("max_ratio",),
        lambda ratio: not 0 <= ratio < 1,
        "{name} {value!r} is outside [0, 1); give one such as 0.95.",
    ),
    _Bound(
        ("validation",),
        lambda share: not 0 <= share < 1,
        "{name} {value} is outside [0, 1); give a share such as 0.1.",
    ),
    _Bound(
        ("activation_memory_budget",),
        lambda share: not 0 < share <= 1,
        "{name} {value} is outside (0, 1]; give a share such as 0.1.",
    ),
)


def check_bounds(job: Any) -> None:
    """Raises UsageError for a number outside its bounds."""
    for names, refused, error in BOUNDS:
        for name in names:
            value = getattr(job, name)
            if value is not None and refused(value):
                raise UsageError(error.format(name=name.replace("_", " "), value=value))


def weight_numbers(class_weights: str) -> tuple[float, ...] | None:
    """The numbers of `Job.class_weights`; None for `balanced`. Raises UsageError otherwise."""
    if class_weights == BALANCED:
        return None
    numbers = []
    for word in class_weights.split(","):
        try:
            numbers.append(float(word))
        except ValueError:
            raise UsageError(
                f"class weights {class_weights!r} are neither {BALANCED!r} nor numbers; give one "
                "for each class, such as 1,2.5,1."
            ) from None
        if not 0 < numbers[-1] < math.inf:
            raise UsageError(
                f"class weight {word.strip()} is not a positive number; give one for each class, "
                "such as 1,2.5,1."
            )
    return tuple(numbers)


def columns_as(text: str) -> dict[str, str]:
    """The notation of `Job.column` as a mapping: name by which a column is read -> the column.

    Raises UsageError for another notation and for a name that occurs twice.
    """
    pairs = [[word.strip() for word in part.partition("=")[::2]] for part in text.split(",")]
    names = dict(pairs)
    if not all(map(all, pairs)) or len(names) < len(pairs):
        raise UsageError(
            f"column {text!r} does not consist of NAME=COLUMN; write each name once, such as "
            "text=title,label=stars."
        )
    return names


def check_columns(job: Any) -> None:
    """Raises UsageError for settings of columns and of masks that mean nothing together."""
    if None not in (job.image_column, job.text_column) and job.task != "embedding":
        raise UsageError("a model takes images or texts; name one column, or --task embedding.")
    if job.column is not None:
        columns_as(job.column)
    if job.mask_values is not None and job.mask_colors is not None:
        raise UsageError("pixels of masks are values or colors; give one of them.")
    for masks, colors in ((job.mask_values, False), (job.mask_colors, True)):
        if masks is not None:
            mask_classes.parse(masks, colors)


def check_pairs(job: Any) -> None:
    """Raises UsageError for settings that exclude each other, and for what is gone."""
    if job.streaming:
        raise UsageError(
            "rows are not streamed any more, since data larger than memory are read from "
            "memory-mapped files; leave streaming out."
        )
    if job.steps is not None and job.epochs is not None:
        raise UsageError("steps and epochs cannot both be set; give one of them.")
    if job.activation_memory_budget is not None and not job.compile:
        raise UsageError(
            "an activation memory budget needs compiled steps; add --compile, or leave "
            "--activation-memory-budget out."
        )
    if job.optimizer == "adamw8bit" and job.processes > 1 and job.strategy == "fsdp":
        raise UsageError(
            "the state of adamw8bit cannot be sharded over processes; choose --strategy ddp, "
            "or --optimizer adamw."
        )
    if job.weights == "bf16" and job.precision not in ("auto", "bf16"):
        raise UsageError(
            f"weights of bf16 are trained in bf16, not in {job.precision}; choose --precision "
            "bf16, or --weights fp32."
        )
    if job.weights == "bf16" and job.optimizer == "sgd":
        raise UsageError(
            "weights of bf16 need an optimizer that rounds updates at random, which sgd does "
            "not; choose --optimizer adamw or adamw8bit."
        )
    if job.ema is not None and job.processes > 1 and job.strategy == "fsdp":
        raise UsageError(
            "an average of weights cannot be sharded over processes; choose --strategy ddp, or "
            "leave --ema out."
        )
    if job.ema is not None and job.weights == "bf16":
        raise UsageError(
            "an average of weights of bf16 would lose small changes; choose --weights fp32, or "
            "leave --ema out."
        )
    if job.scales is not None:
        _check_scales(job)
    if job.class_weights is not None:
        weight_numbers(job.class_weights)
    if job.cached_embeddings and job.processes > 1:
        raise UsageError(
            "micro-batches of embeddings share a loss, which several processes do not; leave "
            "accumulate out."
        )
    if job.optimizer_in_backward:
        _check_in_backward(job)
    if job.optimizer_state == "host":
        _check_host_state(job)


def scale_numbers(scales: str) -> tuple[int, ...]:
    """The numbers of `Job.scales`, ascending; raises UsageError if they are no sizes."""
    words = [word.strip() for word in scales.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"scales {scales!r} are not sizes; give pixels such as 480,512,544.")
    return tuple(sorted({*map(int, words)}))


def _check_scales(job: Any) -> None:
    """Raises UsageError for scales that no training can use."""
    largest = scale_numbers(job.scales)[-1]
    if job.input_size not in (None, largest):
        raise UsageError(
            f"the largest of the scales is {largest}, and the input size {job.input_size}; leave "
            "--input-size out."
        )


def _check_in_backward(job: Any) -> None:
    """Raises UsageError for settings that need the whole gradient before an update."""
    for name in ("accumulate", "processes"):
        if getattr(job, name) > 1:
            raise UsageError(
                "an optimizer in the backward pass updates weights after one pass, so "
                f"{name} must be 1; leave --optimizer-in-backward out."
            )
    if job.precision == "fp16":
        raise UsageError(
            "an optimizer in the backward pass cannot skip overflowed steps of fp16; "
            "choose --precision bf16 or fp32, or leave --optimizer-in-backward out."
        )


def _check_host_state(job: Any) -> None:
    """Raises UsageError for settings that optimizer state on the host does not take."""
    excluded = {
        "several processes": job.processes > 1,
        "fp16, which skips overflowed steps": job.precision == "fp16",
        "an optimizer in the backward pass": job.optimizer_in_backward,
        "CUDA graphs": bool(job.cuda_graphs),
        f"{job.optimizer}, but with adamw": job.optimizer not in (None, "adamw"),
    }
    for what, asked in excluded.items():
        if asked:
            raise UsageError(
                f"optimizer state on the host does not go with {what}; change that, or choose "
                "--optimizer-state card."
            )


def check_batch(job: Any, examples: int | None) -> None:
    """Raises UsageError for a batch that is larger than the data or cannot be split evenly."""
    if examples is not None and job.batch_size > examples:
        raise UsageError(
            f"batch size {job.batch_size} is larger than the "
            f"{units.count(examples, 'training example')} of {job.dataset}; use at most "
            f"{examples}."
        )
    if job.batch_size % job.processes:
        raise UsageError(
            f"batch size {job.batch_size} cannot be split over "
            f"{units.count(job.processes, 'process')}; give one that they divide."
        )
    if job.batch_size // job.processes % job.accumulate:
        raise UsageError(
            f"batch size {job.batch_size // job.processes} cannot be split into "
            f"{job.accumulate} equal micro-batches; accumulate over a number that divides it."
        )
    if job.task == "embedding" and job.batch_size == 1:
        raise UsageError(
            "the other rows of a batch are the negatives of a row, and a batch of 1 has none; give "
            "a larger --batch-size."
        )
    if (job.mixup or job.cutmix) and job.micro_batch % 2:
        raise UsageError(
            "mixup and cutmix mix pairs, and a micro-batch has "
            f"{units.count(job.micro_batch, 'image')}; give an even number."
        )
