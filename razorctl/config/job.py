"""Job: the settings of training, apart from the recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from razorctl import units
from razorctl.config.defaults import FEWEST, ByRows, whole_batch
from razorctl.config.job_checks import (
    check_batch,
    check_bounds,
    check_columns,
    check_pairs,
    scale_numbers,
)
from razorctl.config.settings import check_seed, check_types
from razorctl.config.tasks import EVERY_FIGURE, FIGURES, OF_ROWS, TASKS
from razorctl.errors import UsageError
from razorctl.registry import unknown

Precision = Literal["auto", "fp32", "bf16", "fp16"]
AUGMENT = ("none", "crop", "rand")
OptimizerName = Literal["sgd", "adamw", "adamw8bit"]
Strategy = Literal["ddp", "fsdp"]
Schedule = Literal["cosine", "linear", "constant"]
Weights = Literal["fp32", "bf16"]
OptimizerState = Literal["card", "host"]
Pooling = Literal["mean", "first", "last"]
BoxFormat = Literal["xywh", "xyxy", "cxcywh"]
BOX_FORMATS: tuple[BoxFormat, ...] = get_args(BoxFormat)
# Defaults for models without measured ones: for all optimizers, and by optimizer.
GENERAL = {"batch_size": 64, "steps": 1000, "augment": "none"}
# What a plan may choose of the weights and of the optimizer's state, unless the user does.
STATE = {"weights": "fp32", "optimizer_in_backward": False, "optimizer_state": "card"}
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.01, "weight_decay": 0.0},
    "adamw": {"learning_rate": 1e-4, "weight_decay": 0.01},
}
OPTIMIZERS["adamw8bit"] = OPTIMIZERS["adamw"]
# Part of a model that AdamW trains alone -> factor of the learning rate for all weights. Adapters
# were best at factors of 3 to 33, and failed at 10 on one of five tasks. With SGD, 3 was best.
RATES = {"adapters": 3, "bias": 10, "head": 10}
BY_ROWS = "by_rows"  # key of defaults: the `ByRows` of data that no model has defaults for


# Field -> its values, besides None if its type allows that.
CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "strategy": get_args(Strategy),
    "weights": get_args(Weights),
    "optimizer": get_args(OptimizerName),
    "optimizer_state": get_args(OptimizerState),
    "schedule": get_args(Schedule),
    "augment": AUGMENT,
    "task": TASKS,
    "pooling": get_args(Pooling),
    "box_format": BOX_FORMATS,
    "metric": EVERY_FIGURE,
}

TEMPERATURE = 0.05  # of embeddings of texts
FEWEST_CAPTURED = 20  # steps of a run for which CUDA graphs are captured by default
# By the branches that a compiler takes, a step of ViT-B/16 has 1,018 launches of 102 GB, and else
# 690 of 68 GB: residual sums, statistics and the int8 rows of gradients are passes of their own. An
# H100 would take 1.28 of the time, and 1.1 if equal copies are computed once.
SLOW_COMPILED = (
    "Compiled, a step of {method} is predicted to take 1.1 to 1.3 times as long as in CUDA graphs, "
    "since razorctl's passes are not fused; leave --compile out."
)


@dataclass(frozen=True)
class Job:
    """Model, data set, and an optimizer with linear warmup and a decay.

    A field that is None becomes the model's default, or else a general one; see `resolved`. Raises
    UsageError for values that no training can use.

    Args:
        task: what the model learns; None for the data set's usual task.
        input_size: pixels of an image's side, or tokens of a text.
        epochs: passes over the data, instead of `steps`; may be fractional.
        from_scratch: whether training starts from random weights. Only a tokenizer or the like is
            then loaded from the hub.
        batch_size: examples of a step, in all processes together.
        processes: number of processes that torchrun starts, one per GPU. Each takes an equal part
            of every batch.
        strategy: what several processes share: `ddp`, only the batch; `fsdp`, also the weights, the
            gradients and the state of the optimizer.
        accumulate: number of equal micro-batches over which a step accumulates its gradient.
        precision: `fp32`; `bf16` or `fp16` for autocast, `fp16` with loss scaling; `auto` for the
            best that the device supports.
        optimizer: `sgd`, with momentum; `adamw`; or `adamw8bit`, whose state has 8 bits (torchao).
        weights: dtype of the weights and of the state of `adamw`: `fp32`, or `bf16`, in which
            updates are rounded at random so that small ones are not lost (torchao).
        optimizer_in_backward: whether each weight is updated as soon as its gradient is computed;
            the gradient is then freed. It is not clipped, and its norm is reported as 0.
        optimizer_state: where the state of `adamw` is: on the `card`, or on the `host`, which
            updates masters of the weights in single precision. Each gradient then leaves the card
            as soon as it exists. If this, `weights` and `optimizer_in_backward` are None, a plan
            may choose them; without one they are `card`, `fp32` and False.
        augment: `none`; `crop`, a random resized crop and flip of each image; `rand`, RandAugment
            too. None is `none` if a run on user data takes no image twice.
        scales: pixels of an image's side, separated by commas, one of which is drawn for each
            micro-batch of detection. The largest is the input size, for which memory is planned.
        mixup, cutmix: alpha of the Beta distribution from which the share of a second image is
            drawn.
        label_smoothing: share of each label that is spread over all classes.
        class_weights: weights of the loss by class: `balanced`, inverse to the class's rows or
            pixels in training; or a number for each class, separated by commas. They are scaled to
            a mean of 1 over the training labels. Evaluations weight all labels equally.
        pooling: how states of tokens become the embedding of a text: their mean, the first one, or
            the last one. None follows the pretrained model; without a setting there, it is the
            last one for a decoder, else the mean.
        temperature: divides the cosines of embeddings in the loss over a batch. None is 0.05, or
            for images and texts the scale of the model, which is trained.
        symmetric: whether the contrastive loss of pairs of texts is symmetric; otherwise only first
            texts retrieve second ones. With images and texts it always is.
        learning_rate: highest learning rate.
        weight_decay: of weights; biases and norms have none.
        layer_decay: factor of the learning rate from each layer to the one below.
        schedule: how the learning rate falls after the warmup, to 0 at the end: as half a `cosine`,
            or `linear`; `constant` stays at `learning_rate`.
        warmup_steps: steps in which the learning rate rises to `learning_rate`.
        clip_norm: largest norm of the whole gradient.
        ema: decay of an exponential moving average of the weights, in (0, 1); the first steps use a
            lower one. The average is evaluated and exported, and takes the memory of another copy
            of the weights; buffers are averaged too. None for no average.
        freeze: weights that are not trained: a number of blocks, with everything before them; or
            patterns of names, separated by commas, such as `patch_embed,blocks.[0-5],*norm*`. A
            pattern matches a parameter, or a module with all its parameters. Frozen batch norms
            normalize by their running statistics.
        max_ratio: the largest ratio that a plan may choose, or a run that is out of memory.
        strict: whether a step that runs out of memory ends the run. Otherwise it is repeated in
            smaller micro-batches, then at a higher ratio, then with a lower joint budget.
        metric: the metric by which the best weights are chosen; None for the data set's.
        patience: evaluations without an improvement after which the run ends; 0 for no limit. None
            is half of the evaluations for user data with a validation split, if neither steps nor
            epochs are set, and otherwise no limit.
        evaluate_every: steps between evaluations, on the validation split or, without one, on the
            test split. The last step is evaluated too.
        save_every: steps between checkpoints; None for one with every evaluation. The last step and
            each evaluation that is the best so far have one too.
        keep_checkpoints: whether the newest and the best checkpoint stay when the run is finished.
        workers: processes that load rows ahead; None is 8, or the number of cores, on CUDA, else 0.
        compile: whether training steps run through torch.compile.
        cuda_graphs: whether forward and backward passes are captured as CUDA graphs, compiled or
            not; None as `eager_reason` says. Texts are then padded to one of at most six lengths,
            and joined ones fill at most six shapes, all chosen by the lengths of the texts.
            Evaluations and updates cannot use the memory of graphs: on an H100 a step reserved 1.06
            (full) to 1.23 (razor at 0.97) times its allocated peak. A plan does not count this
            memory, and notes if it may be lacking; the run then continues without graphs.
        activation_memory_budget: the largest share of the saved bytes that torch.compile stores; it
            recomputes the rest. In (0, 1]; None is 1. No plan predicts these bytes.
        column: aliases of columns: with `text=title,label=stars` the column `title` is read as if
            it were called `text`. None reads all columns by their own names.
        image_column, text_column, label_column: the columns to use; None detects them. A pair of
            texts is in two columns, `a,b`, and so are prompts and answers. Labels are also tags,
            masks or boxes.
        mask_values: the values of masks that are classes: `0-20`, or `0=ground,255=car` with names.
            255 is no class unless it is listed. None takes the values in the training masks.
        mask_colors: the colors of masks that are classes, with names: `000000,ff0000=car`. A color
            or a value with the name `ignore` is no class.
        box_format: the order of a box's numbers in tables: `xywh` for left, top, width and height,
            `xyxy` for corners, `cxcywh` for the center, width and height. None detects it.
        split: the names of the splits to use, `train,validation,test`. One that is omitted at the
            end, or is empty, is not used; None detects them.
        validation: share of the training rows that is held out if there is no validation split.
        max_rows: the most rows to train on, drawn with the seed and about the same share of each
            class; None for all. Rows that are held out are taken before, so that they and the other
            splits do not depend on it.
        skip_bad: whether bad rows are dropped; otherwise they are refused.
        streaming: False. Run directories have it, and no option does: no rows are streamed.
        packing: True joins several conversations or texts, kept apart, into a sequence; False pads
            them. None joins conversations if that shortens an epoch by a fifth, and splits texts
            into blocks of tokens.
    """

    model: str
    dataset: str
    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    accumulate: int = 1
    processes: int = 1
    strategy: Strategy = "ddp"
    precision: Precision = "auto"
    optimizer: str | None = None
    weights: Weights | None = None
    optimizer_in_backward: bool | None = None
    optimizer_state: OptimizerState | None = None
    input_size: int | None = None
    augment: str | None = None
    scales: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    class_weights: str | None = None
    pooling: Pooling | None = None
    temperature: float | None = None
    symmetric: bool = False
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    layer_decay: float = 1.0
    schedule: Schedule = "cosine"
    warmup_steps: int | None = None
    clip_norm: float = 1.0
    ema: float | None = None
    freeze: str | None = None
    max_ratio: float = 0.97
    strict: bool = False
    metric: str | None = None
    patience: int | None = None
    evaluate_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: bool = False
    workers: int | None = None
    compile: bool = False
    cuda_graphs: bool | None = None
    activation_memory_budget: float | None = None
    column: str | None = None
    image_column: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    mask_values: str | None = None
    mask_colors: str | None = None
    box_format: BoxFormat | None = None
    split: str | None = None
    validation: float | None = None
    max_rows: int | None = None
    skip_bad: bool = False
    streaming: bool = False
    packing: bool | None = None
    task: str | None = None
    from_scratch: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_seed(self.seed)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise unknown(name, value, choices)
        figures = FIGURES.get(self.task, EVERY_FIGURE)  # type: ignore[call-overload]
        if self.metric is not None and self.metric not in figures:
            raise unknown(f"metric of {self.task}", self.metric, figures)
        check_bounds(self)
        check_columns(self)
        check_pairs(self)

    def resolved(self, defaults: Mapping[str, Any], examples: int | None, part: str = "") -> "Job":
        """The job for `examples` training examples, with defaults for None, and steps for epochs.

        The number of examples is None for texts before they are tokenized. Then the steps of epochs
        stay None, and so do the fields that depend on them. Otherwise only `save_every`, `patience`
        and `input_size` (the model's own) may stay None.

        defaults: a model's, as in `Model.defaults`; for user data, as returned by `data.pair`.
        part: what is trained instead of all weights, as `Recipe.part`.
        Raises UsageError if a batch is larger than the data, or cannot be split into equal
        micro-batches.
        """
        by_rows: ByRows | None = defaults.get(BY_ROWS)
        of_model = {k: v for k, v in defaults.items() if k not in (*OPTIMIZERS, BY_ROWS)}
        optimizer = self.optimizer or of_model.get("optimizer", "sgd")
        by_optimizer = defaults.get(optimizer.removesuffix("8bit"), {})
        settings = {**GENERAL, **STATE, **OPTIMIZERS[optimizer], **of_model, **by_optimizer}
        settings["optimizer"] = optimizer
        settings["learning_rate"] *= RATES.get(part, 1) if optimizer != "sgd" else 1
        if by_rows is not None and examples is not None:
            settings["epochs"] = by_rows.epochs(examples)
            settings["batch_size"] = by_rows.batch_size(settings["batch_size"], examples)
        if self.scales is not None:
            settings["input_size"] = scale_numbers(self.scales)[-1]
        parts = self.processes * self.accumulate * (2 if self.mixup or self.cutmix else 1)
        settings["batch_size"] = whole_batch(settings["batch_size"], examples, parts)
        if self.epochs is not None or "epochs" in settings or (by_rows and examples is None):
            del settings["steps"]
        if self.steps is not None:
            settings.pop("epochs", None)
        unset = {name: value for name, value in settings.items() if getattr(self, name) is None}
        job = replace(self, **unset)
        check_batch(job, examples)
        size = job.batch_size or 1
        per_epoch = None if examples is None else examples // size
        if job.epochs is not None and per_epoch is not None:
            job = replace(job, epochs=None, steps=math.ceil(job.epochs * per_epoch))
        if job.steps is None:
            return job
        # Images that are seen only once need no augmentation.
        once = by_rows is not None and per_epoch is not None and job.steps <= per_epoch
        augment = self.augment or ("none" if once else job.augment)
        warmup = min(500, job.steps // 10) if job.warmup_steps is None else job.warmup_steps
        every, patience = job.evaluate_every, job.patience
        if every is None:
            every = math.ceil(job.steps / FEWEST)
            if by_rows is not None and per_epoch is not None:
                every = by_rows.evaluate_every(job.steps, per_epoch, size)
        if patience is None and by_rows is not None and self.steps is None and self.epochs is None:
            patience = by_rows.patience(math.ceil(job.steps / every))
        job = replace(job, augment=augment, warmup_steps=warmup)
        return replace(job, evaluate_every=every, patience=patience)

    @property
    def classifies(self) -> bool:
        """Whether each row has exactly one class."""
        return self.task in (None, "classification")

    @property
    def of_rows(self) -> bool:
        """Whether all rows of a batch have the same weight in its loss."""
        return self.task is None or self.task in (*OF_ROWS, "embedding")

    @property
    def cached_embeddings(self) -> bool:
        """Whether the micro-batches of a step share a loss; see `step.cached_step`."""
        return self.task == "embedding" and self.accumulate > 1

    @property
    def micro_batch(self) -> int:
        """Examples that a process takes at once; needs a resolved job."""
        assert self.batch_size is not None
        return self.batch_size // (self.processes * self.accumulate)

    @property
    def captured(self) -> bool:
        """Whether micro-batches become CUDA graphs without torch.compile."""
        return bool(self.cuda_graphs) and not self.compile

    def eager_reason(self, joint_budget: float) -> str | None:
        """Why steps on CUDA are not captured by default; None if they are.

        joint_budget: of the recipe.
        """
        steps = FEWEST_CAPTURED if self.steps is None else self.steps
        reasons = {
            "steps are compiled": self.compile,
            f"a run of {units.count(steps, 'step')} is too short": steps < FEWEST_CAPTURED,
            "a batch is shared by several processes": self.processes > 1,
            "the matcher of objects runs on the host": self.task == "detection",
            "micro-batches share a loss": self.cached_embeddings,
            "a joint budget samples anew in every step": joint_budget < 1,
            "the optimizer runs in the backward pass": bool(self.optimizer_in_backward),
            "the optimizer's state is on the host": self.optimizer_state == "host",
        }
        return next((why for why, holds in reasons.items() if holds), None)

    @property
    def buckets(self) -> bool:
        """Whether all gradients are allocated at all times, as under DDP."""
        return self.processes > 1 and self.strategy == "ddp"

    def decay(self, step: int) -> float:
        """The share of `learning_rate` that a step uses, counted from 0; needs a resolved job."""
        assert self.steps is not None
        assert self.warmup_steps is not None
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return 1 - done if self.schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)


def resolve_precision(precision: Precision, compute_capability: str) -> Precision:
    """The precision that `Job.precision` means on a card.

    `auto` is bf16 from compute capability 8.0, fp16 from 7.0, and fp32 below. Raises UsageError
    for bf16 on a card without it, where torch would emulate it slowly.
    """
    capability = tuple(map(int, compute_capability.split(".")))
    if precision == "bf16" and capability < (8, 0):
        raise UsageError(
            f"bf16 needs compute capability 8.0, and the card has {compute_capability}; "
            "choose fp16."
        )
    if precision != "auto":
        return precision
    return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
