"""Job: all that training needs, beside the recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from razorctl.config.registry import unknown
from razorctl.config.settings import check_seed, check_types
from razorctl.errors import UsageError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
OptimizerName = Literal["sgd", "adamw"]
# Settings of a job whose model has no measured ones: for all, and by optimizer.
GENERAL = {"batch_size": 64, "steps": 1000}
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.01, "weight_decay": 0.0},
    "adamw": {"learning_rate": 1e-4, "weight_decay": 0.01},
}


@dataclass(frozen=True)
class Job:
    """Model, data set, and an optimizer with linear warmup and cosine decay.

    None means the model's default, for the optimizer where that matters, else the one `resolved`
    names. Raises UsageError for values no training can use.

    input_size: pixels of an image's side, or tokens of a text.
    epochs: an alternative to steps; fractions are fine.
    accumulate: micro-batches, of equal size, that the gradient of a step adds up over.
    precision: fp32; bf16 or fp16 by autocast, fp16 with loss scaling; auto is what suits the
        device best.
    optimizer: sgd, with momentum, or adamw.
    warmup_steps: over which the learning rate rises to `learning_rate`.
    clip_norm: largest norm of the whole gradient.
    evaluate_every: steps between two evaluations on the test split; the last step always has one.
    """

    model: str
    dataset: str
    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    accumulate: int = 1
    precision: Precision = "auto"
    optimizer: OptimizerName = "sgd"
    input_size: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    warmup_steps: int | None = None
    clip_norm: float = 1.0
    evaluate_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_seed(self.seed)
        if self.steps is not None and self.epochs is not None:
            raise UsageError("steps and epochs are two ways to say the same; give one of them.")
        for name, choices in (
            ("precision", get_args(Precision)),
            ("optimizer", get_args(OptimizerName)),
        ):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        for name in (
            "input_size",
            "batch_size",
            "accumulate",
            "steps",
            "epochs",
            "learning_rate",
            "clip_norm",
            "evaluate_every",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(
                    f"{name.replace('_', ' ')} {value} is not a positive number; give one."
                )
        for name in ("momentum", "weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name.replace('_', ' ')} {value} is negative or not a number.")

    def resolved(self, defaults: Mapping[str, Any], examples: int) -> "Job":
        """This job with every None settled, `epochs` as steps, for `examples` training examples.

        `defaults` are a model's: settings by name, and by name of an optimizer those for it alone.
        Raises UsageError if a batch is larger than the data, or cannot be cut into micro-batches.
        """
        own = {name: value for name, value in defaults.items() if name not in OPTIMIZERS}
        by_optimizer = defaults.get(self.optimizer, {})
        settings = {**GENERAL, **OPTIMIZERS[self.optimizer], **own, **by_optimizer}
        if self.epochs is not None or "epochs" in defaults:
            del settings["steps"]
        if self.steps is not None:
            settings.pop("epochs", None)
        unset = {name: value for name, value in settings.items() if getattr(self, name) is None}
        job = replace(self, **unset)
        assert job.batch_size is not None
        if job.batch_size > examples:
            raise UsageError(
                f"batch size {job.batch_size} is larger than the {examples} training examples of "
                f"{job.dataset}; use at most {examples}."
            )
        if job.batch_size % job.accumulate:
            raise UsageError(
                f"batch size {job.batch_size} cannot be cut into {job.accumulate} equal "
                "micro-batches; accumulate over a number that divides it."
            )
        if job.epochs is not None:
            job = replace(
                job, epochs=None, steps=math.ceil(job.epochs * (examples // job.batch_size))
            )
        assert job.steps is not None
        warmup = min(500, job.steps // 10) if job.warmup_steps is None else job.warmup_steps
        every = job.evaluate_every or math.ceil(job.steps / 5)
        return replace(job, warmup_steps=warmup, evaluate_every=every)

    def decay(self, step: int) -> float:
        """The share of `learning_rate` in effect at a step counted from 0; needs a resolved job."""
        assert self.steps is not None
        assert self.warmup_steps is not None
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))


def settle_precision(precision: Precision, compute_capability: str) -> Precision:
    """What `Job.precision` means on a card: auto is bf16 from 8.0 on, fp16 from 7.0, else fp32.

    Raises UsageError for bf16 on a card without it, which torch would emulate, slowly.
    """
    capability = tuple(map(int, compute_capability.split(".")))
    if precision == "bf16" and capability < (8, 0):
        raise UsageError(
            f"bf16 needs compute capability 8.0 and the card has {compute_capability}; choose fp16."
        )
    if precision != "auto":
        return precision
    return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
