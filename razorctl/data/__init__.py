"""Data sets by name, and one's own.

Every module of this package is imported and defines `DATASETS`, a tuple of `Source` entries. The
package `own` is for what has no entry: files and folders of a user, and any set of the hub.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import folders, models
from razorctl.config import registry
from razorctl.defaults import FROM_SCRATCH, ByRows
from razorctl.errors import UsageError
from razorctl.job import BY_ROWS, Job
from razorctl.models import Progress as Progress
from razorctl.tasks import FIGURES, Task

if TYPE_CHECKING:
    from datasets import Dataset

    from razorctl.data.own.stream import Stream

SETTINGS = ("image_column", "text_column", "label_column", "split", "validation")  # of one's own
LENGTH = ("steps", "epochs", "warmup_steps", "evaluate_every")  # a model's, for its paper's data


@dataclass(frozen=True)
class Splits:
    """The rows of each split, and the class names; a validation or a test split is there.

    Splits are data sets, or all are streams if the job says so.

    A row for classification has a `label`, which is an index into `classes`, and an `image`, or a
    `text` and sometimes a `text_pair`. One for segmentation has an `image` and a `mask` of the same
    size, whose values `models.masks` says, and may have a `first` as there. Images may have a
    `white`, the level of white in their set as `models.images` has it. One for language modelling
    has a `text`, or `messages`, each with a `role` and a `content`; it has no classes.

    skipped: a line for each bad row that is left out; of streams, as they are read. record: what
    was held out and skipped, a JSON value from which the splits can be repeated; None if all rows
    are used as they are, or streamed. digests: split -> that of its rows, as `own.contents` has it;
    None before it is known, and of streams. white: that of the rows, if they have one. notes: what
    a user may not have meant, in sentences.
    """

    train: "Dataset | Stream"
    validation: "Dataset | Stream | None"
    test: "Dataset | Stream | None"
    classes: tuple[str, ...]
    skipped: Sequence[str] = ()
    record: Mapping[str, Any] | None = None
    digests: Mapping[str, str] | None = None
    white: int | None = None
    notes: Sequence[str] = ()

    @property
    def evaluated(self) -> tuple[str, "Dataset | Stream"]:
        """The name and the rows of the split that is evaluated during training."""
        if self.validation is not None:
            return "validation", self.validation
        assert self.test is not None
        return "test", self.test


@dataclass(frozen=True)
class Source:
    """A data set, with what is known before it is loaded.

    train_examples, test_examples: rows of the split that is trained on, and of the one that is
        evaluated at the end; None if they are not known before they are streamed, or before texts
        become blocks of tokens.
    load: returns the splits; it may be given a `Progress`. Raises MissingError if the files cannot
        be found, and DataError if they cannot be read.
    told: lines on what was detected.
    metric: the figure that it is judged by; None is the usual one of the task.
    task: what it is for.
    validated: whether it has a validation split. evaluated_examples: rows of the split that is
        evaluated during training, None if that is not known; both of one's own data alone.
    """

    name: str
    summary: str
    modality: models.Modality
    classes: int
    train_examples: int | None
    test_examples: int | None
    load: Callable[..., Splits]
    told: tuple[str, ...] = ()
    metric: str | None = None
    task: Task = "classification"
    validated: bool = False
    evaluated_examples: int | None = None


DATASETS: dict[str, Source] = {
    source.name: source
    for file in registry.modules(__name__, __path__, skip=("own",))
    for source in file.DATASETS
}


def find(name: str) -> Source:
    """The registered data set of that name.

    Raises UsageError, with the nearest name, if there is none.
    """
    return registry.find("data set", name, DATASETS)


def of(job: Job) -> Source:
    """The data set of a job: a registered one, or else one's own.

    Loads no torch. Raises UsageError if there is none or a setting does not apply to it, DataError
    if its files cannot be read, and MissingError if it is not on the hub.
    """
    if job.dataset not in DATASETS:
        from razorctl.data import own  # which needs the definitions above

        return own.find(job)
    source = DATASETS[job.dataset]
    if source.task == "causal-lm":  # or any other that learns from texts
        from razorctl.data.own.ask import Ask

        source = replace(source, task=Ask.of(job).language or source.task)
    if job.task not in (None, source.task):
        raise UsageError(
            f"{job.dataset} is for {source.task}; leave --task out, or name data for {job.task}."
        )
    if job.streaming:
        raise UsageError(f"{job.dataset} is read as a whole; leave --streaming out.")
    for name in SETTINGS:
        if getattr(job, name) is not None:
            raise UsageError(
                f"{job.dataset} has its own columns and splits; leave --{name.replace('_', '-')} "
                "out."
            )
    return source


def place(name: str) -> str:
    """The name of a data set, which for files and folders of one's own is their absolute path."""
    if name in DATASETS or not folders.exists(Path(name).expanduser()):
        return name
    return str(Path(name).expanduser().resolve())


def usual(task: Task, modality: models.Modality) -> str:
    """The name of the data set that a model of this kind is planned for if none is given."""
    if task == "classification":
        return {"image": "cifar100", "text": "rte"}[modality]
    return "scene_parse_150" if task == "segmentation" else "wikitext2"


def pair(job: Job) -> tuple[models.Model, Source]:
    """The model and the data set of a job, with the model's defaults for these data.

    Raises what `of` raises, and UsageError for an unknown model and if the model cannot take the
    data set.
    """
    known = models.named(job.model)
    source = of(job)
    if known.modality != source.modality:
        fitting = [
            s.name
            for s in DATASETS.values()
            if s.modality == known.modality and s.task in known.tasks
        ]
        mend = f"choose one of {', '.join(fitting)}" if fitting else f"name {known.modality}s"
        raise UsageError(
            f"{job.model} takes {known.modality}s, and {job.dataset} has {source.modality}s; "
            f"{mend}."
        )
    family = models.find(job.model, source.task)
    metric = source.metric or FIGURES[source.task][0]
    defaults = {**family.defaults, "metric": metric}
    if source.name not in DATASETS:
        own = dict(family.own)
        times = max(own.pop("times", 1), FROM_SCRATCH if job.from_scratch else 1)
        by_rows = ByRows(
            *(source.task, source.modality, source.validated, source.evaluated_examples, times)
        )
        if family.augmented is not None and source.task == "classification":
            own = {"augment": "crop", **own}
        kept = {name: value for name, value in defaults.items() if name not in LENGTH}
        defaults = {**kept, **own, BY_ROWS: by_rows}
    return replace(family, defaults=defaults), source


def check(job: Job) -> Source:
    """The data set of a job.

    Raises what `pair` raises, and UsageError for every mistake in the job that can be found before
    a model is loaded.
    """
    family, source = pair(job)
    changes = job.augment not in (None, "none") or job.mixup or job.cutmix
    if changes and family.augmented is None:
        raise UsageError(
            f"{job.model} takes {family.modality}s, which are not augmented; leave --augment, "
            "--mixup and --cutmix out."
        )
    if (job.mixup or job.cutmix) and source.task != "classification":
        raise UsageError(
            f"mixup and cutmix mix the labels of images, and {job.dataset} is for {source.task}; "
            "leave them out."
        )
    job.resolved(family.defaults, source.train_examples)
    return source
