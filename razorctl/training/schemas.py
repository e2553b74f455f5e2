"""The documents of a run directory as types, which `documents` checks; None is infinity or NaN."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from razorctl import units
from razorctl.config.job import BoxFormat, Job
from razorctl.config.recipe import Recipe
from razorctl.config.tasks import EVERY_FIGURE
from razorctl.planning.candidates import Predicted
from razorctl.training.metrics import ByClass
from razorctl.training.payoff import Payoff

Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class Checksum:
    """The size and the checksum of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Relieved:
    """A step that ran out of memory, with the fields of the `recovery.Relief` from then on."""

    step: int
    parts: int
    ratio: float | None
    joint_budget: float | None
    captured: bool


@dataclass(frozen=True)
class RunResult:
    """A result.json, made by `summary_of`; checksums: path in the run directory -> checksum."""

    run_dir: str
    model: str
    dataset: str
    classes: Sequence[str]
    recipe: Recipe
    job: Job
    steps: int
    stopped_early: bool
    out_of_memory: Sequence[Relieved]
    metric: str
    accuracy: float | None
    loss: float | None
    split: str
    metrics: Figures
    saved_bytes: int
    full_saved_bytes: int
    peak_bytes: int | None
    step_seconds: float
    epoch_seconds: float | None
    device: str
    weights: str
    best_step: int
    best_accuracy: float | None
    best_weights: str
    predicted: Predicted | None
    compiled: bool
    payoff: Payoff | None
    best_metrics: Figures
    by_class: ByClass | None  # of the best weights
    checksums: Mapping[str, Checksum]
    digest: str
    validation_accuracy: float | None = None
    validation_loss: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in EVERY_FIGURE or self.metric not in {*self.metrics, "accuracy"}:
            raise ValueError(f"metric {self.metric} is none of its figures")
        if self.by_class is not None and len(self.by_class.labels) != len(self.classes):
            raise ValueError("by_class is not of its classes")
        if not 1 <= self.best_step <= self.steps:
            raise ValueError(
                f"best step {self.best_step} is none of its {units.count(self.steps, 'step')}"
            )
        if self.full_saved_bytes < 1 or self.saved_bytes < 0:
            raise ValueError("it stores no bytes")


@dataclass(frozen=True)
class StepLine:
    """A line of metrics.jsonl, made of a `metrics.Step`."""

    step: int
    epoch: float
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    seconds: float
    samples_per_second: float
    accuracy: float | None
    test_loss: float | None
    metrics: Figures | None


@dataclass(frozen=True)
class Marker:
    """The marker of a checkpoint.

    step: the number of steps so far. score: of the last step; None if it was not evaluated. files:
    name in the checkpoint's directory -> checksum. digest: of the other fields.
    """

    format: int
    razorctl: str
    step: int
    score: float | None
    diverged: bool
    relieved: Sequence[Relieved]
    settings: Mapping[str, str | int | float | bool | None]
    files: Mapping[str, Checksum]
    digest: str

    def __post_init__(self) -> None:
        for name in self.files:
            if name in ("", ".", "..") or set(name) & set("/\\:\0"):
                raise ValueError(f"files: {name!r} is not the name of a file")
        if type(self.settings.get("steps")) is not int:
            raise ValueError("settings.steps: it is not a number")


@dataclass(frozen=True)
class Split:
    """A split.json, made by `run_files.split_document`."""

    dataset: str | None = None
    split: str | None = None
    validation: float | None = None
    seed: int | None = None
    rows: Sequence[int] | None = None
    skipped: Mapping[str, Sequence[int]] | None = None
    digests: Mapping[str, str] | None = None
    white: Literal[1, 255, 65535] | None = None
    mask_classes: str | None = None
    box_format: BoxFormat | None = None


@dataclass(frozen=True)
class Pretrained:
    """A pretrained.json, made by `run_files.pretrained`; files: name -> checksum."""

    model: str
    files: Mapping[str, Checksum]
    digest: str


@dataclass(frozen=True)
class Trackers:
    """A trackers.json: the names of a run's trackers, and the run's id in them."""

    names: Sequence[str]
    id: str


@dataclass(frozen=True)
class Failure:
    """A failure.json: the error of a run of a grid, with its exit code."""

    error: str
    exit_code: int


@dataclass(frozen=True)
class RunSettings:
    """The tables of a config.toml with the settings of a run."""

    job: Job
    recipe: Recipe


@dataclass(frozen=True)
class Ratio:
    """The setting that all recipes of a grid share."""

    ratio: float


@dataclass(frozen=True)
class Runs:
    """The runs of a grid; lists: setting -> values."""

    methods: Sequence[str]
    seeds: Sequence[int]
    lists: Mapping[str, Sequence[int | float]] | None = None

    def __post_init__(self) -> None:
        if not self.methods or not self.seeds:
            raise ValueError("there are no methods or no seeds")


@dataclass(frozen=True)
class GridSettings:
    """The tables of a comparison.toml."""

    job: Job
    recipe: Ratio
    runs: Runs
    environment: Mapping[str, str] = field(default_factory=dict)
