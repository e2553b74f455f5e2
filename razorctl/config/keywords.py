"""The fields of a Recipe and a Job as keywords of the functions in `razorctl.api`.

None leaves a setting to the preset, the model or the method. A sequence is a text with commas:
`["a", "b"]` is `"a,b"`.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

from razorctl.config.job import (
    BoxFormat,
    OptimizerName,
    OptimizerState,
    Pooling,
    Precision,
    Schedule,
    Strategy,
    Weights,
)
from razorctl.config.recipe import Joint
from razorctl.config.tasks import Task
from razorctl.methods import Attention

Names = str | Sequence[str]
# Settings that `compare` takes several values of, as numbers or as a text such as "1,2".
Integers = int | str | Sequence[int]
Numbers = float | str | Sequence[float]
Prefer = Literal["balanced", "exact", "fast"]  # the preference of a plan
Augment = Literal["none", "crop", "rand"]


class RecipeSettings(TypedDict, total=False):
    """The fields of a Recipe, except the seed, which is a job's too."""

    method: str | None
    ratio: float | None
    joint_budget: float | None
    joint: Joint | None
    attention: Attention | None
    mean_correction: bool | None
    unbiased: bool | None
    int8_weight_grad: bool | None
    int8_input_grad: bool | None
    int8_forward: bool | None
    activation_checkpointing: bool | None
    lora: bool | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: Names | None


class DataSettings(TypedDict, total=False):
    """The settings of user data, and the fields of a Job that all functions take."""

    task: Task | None
    column: Names | None
    image_column: str | None
    text_column: Names | None
    label_column: Names | None
    mask_values: Names | None
    mask_colors: Names | None
    box_format: BoxFormat | None
    split: Names | None
    skip_bad: bool | None
    precision: Precision | None
    optimizer: OptimizerName | None
    compile: bool | None
    cuda_graphs: bool | None


class PredictedSettings(TypedDict, total=False):
    """The settings of data without labels that a finished run reads."""

    column: Names | None
    image_column: str | None
    text_column: Names | None
    skip_bad: bool | None


class EvaluatedSettings(PredictedSettings, total=False):
    """The settings of data with labels that a finished run reads."""

    label_column: Names | None
    mask_values: Names | None
    mask_colors: Names | None
    box_format: BoxFormat | None


class ProfiledSettings(RecipeSettings, DataSettings, total=False):
    """The settings that change the cost of a step."""

    batch_size: int | None
    input_size: int | None
    validation: float | None
    max_rows: int | None


class PlannedSettings(RecipeSettings, DataSettings, total=False):
    """The settings of a run, except `accumulate`, which a plan chooses."""

    batch_size: int | Literal["auto"] | None
    steps: int | None
    epochs: float | None
    processes: int | None
    strategy: Strategy | None
    weights: Weights | None
    optimizer_in_backward: bool | None
    optimizer_state: OptimizerState | None
    input_size: int | None
    augment: Augment | None
    scales: Names | Sequence[int] | None
    mixup: float | None
    cutmix: float | None
    label_smoothing: float | None
    class_weights: str | Sequence[float] | None
    pooling: Pooling | None
    temperature: float | None
    symmetric: bool | None
    learning_rate: float | None
    lr: float | None  # short for learning_rate
    momentum: float | None
    weight_decay: float | None
    layer_decay: float | None
    schedule: Schedule | None
    warmup_steps: int | None
    clip_norm: float | None
    ema: float | None
    freeze: str | int | Sequence[str] | None
    max_ratio: float | None
    strict: bool | None
    metric: str | None
    patience: int | None
    evaluate_every: int | None
    save_every: int | None
    keep_checkpoints: bool | None
    workers: int | None
    activation_memory_budget: float | None
    validation: float | None
    max_rows: int | None
    packing: bool | None
    from_scratch: bool | None
    seed: int | None


class TrainingSettings(PlannedSettings, total=False):
    """The settings of a run."""

    accumulate: int | None


class ComparedSettings(DataSettings, total=False):
    """The settings that the runs of a comparison share, or in which they differ."""

    ratio: Numbers | None
    steps: Integers | None
    epochs: Numbers | None
    input_size: Integers | None
    batch_size: Integers | None
    learning_rate: Numbers | None
    lr: Numbers | None  # short for learning_rate
    weight_decay: Numbers | None
    layer_decay: Numbers | None
    momentum: Numbers | None
    schedule: Schedule | None
    warmup_steps: Integers | None
    clip_norm: Numbers | None
    ema: Numbers | None
    freeze: str | int | Sequence[str] | None
    label_smoothing: Numbers | None
    class_weights: str | Sequence[float] | None
    pooling: Pooling | None
    temperature: Numbers | None
    symmetric: bool | None
    workers: Integers | None
    evaluate_every: Integers | None
    validation: Numbers | None
    max_rows: Integers | None
    metric: str | None
    weights: Weights | None
