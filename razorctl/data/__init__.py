"""The data set of a job: a registered one, or a user's.

The package `own` reads data sets without an entry: files, folders, and any set of the hub.
"""

from dataclasses import replace
from typing import Any

from razorctl import models, units
from razorctl.config.defaults import FROM_SCRATCH, ByRows
from razorctl.config.job import BY_ROWS, TEMPERATURE, Job
from razorctl.config.job_checks import weight_numbers
from razorctl.config.tasks import FIGURES, Task
from razorctl.data.catalog import DATASETS as DATASETS
from razorctl.data.catalog import find as find
from razorctl.data.catalog import place as place
from razorctl.data.source import Source as Source
from razorctl.data.source import Splits as Splits
from razorctl.errors import UsageError
from razorctl.models import Modality

# Settings for a user's data alone.
SETTINGS: tuple[str, ...] = ("column", "image_column", "text_column", "label_column")
SETTINGS += ("mask_values", "mask_colors", "box_format", "split", "validation")
USUAL: dict[tuple[Task, Modality], str] = {
    ("classification", "image"): "cifar100",
    ("classification", "text"): "rte",
    ("regression", "text"): "stsb",
    ("segmentation", "image"): "scene_parse_150",
    ("causal-lm", "text"): "wikitext2",
    ("masked-lm", "text"): "wikitext2",
}
LENGTH = ("steps", "epochs", "warmup_steps", "evaluate_every")  # a model's, for its paper's data


def source_of(job: Job) -> Source:
    """The data set of a job: a registered one, or else a user's.

    Loads no torch. Raises UsageError if there is none or a setting does not apply to it, DataError
    if its files cannot be read, and MissingError if it is not on the hub.
    """
    if job.dataset not in DATASETS:
        from razorctl.data import own

        return own.find(job)
    source = DATASETS[job.dataset]
    if source.task == "causal-lm":  # or any other that learns from texts
        from razorctl.data.own.request import DataRequest

        source = replace(source, task=DataRequest.of(job).language or source.task)
    if job.task not in (None, source.task):
        raise UsageError(
            f"{job.dataset} is for {source.task}; leave --task out, or name data for {job.task}."
        )
    for name in SETTINGS:
        if getattr(job, name) is not None:
            raise UsageError(
                f"{job.dataset} has its own columns and splits; leave --{name.replace('_', '-')} "
                "out."
            )
    return source if job.max_rows is None else _limited(source, job)


def _limited(source: Source, job: Job) -> Source:
    """A registered data set with at most `max_rows` training rows."""
    from razorctl.data.own.held_out import limited
    from razorctl.data.own.request import DataRequest

    if source.train_examples is None:
        DataRequest.of(job).check_texts(1)

    def load(progress: models.Progress = lambda _: None) -> Splits:
        import numpy as np

        splits = source.load(progress)
        rows: Any = splits.train
        classes = source.task == "classification"
        labels = np.asarray(rows["label"][:]) if classes else np.zeros(len(rows), int)
        return replace(splits, train=rows.select(limited(labels, job.max_rows, job.seed)))

    count = min(source.train_examples or 0, job.max_rows or 0)
    return replace(source, train_examples=count, load=load)


def usual(task: Task, modality: Modality) -> str:
    """The name of the data set that models of this kind are planned for by default.

    Raises UsageError for a task that no registered data set is for.
    """
    if (task, modality) not in USUAL:
        raise UsageError(
            f"no listed data set is for {task} of {modality}s; name a data set of your own."
        )
    return USUAL[task, modality]


def pair(job: Job) -> tuple[models.Model, Source]:
    """The model of a job, with its defaults for the data set, and the data set.

    Raises what `source_of` raises, and UsageError for an unknown model or one that cannot take the
    data set.
    """
    entry = models.named(job.model)
    source = source_of(job)
    if entry.modality != source.modality:
        fitting = [
            s.name
            for s in DATASETS.values()
            if s.modality == entry.modality and s.task in entry.tasks
        ]
        mend = f"choose one of {', '.join(fitting)}" if fitting else f"name {entry.modality}s"
        raise UsageError(
            f"{job.model} takes {entry.modality}s, and {job.dataset} has {source.modality}s; "
            f"{mend}."
        )
    _check_class_weights(job, source)
    family = models.find(job.model, source.task)
    metric = source.metric or FIGURES[source.task][0]
    defaults = {**family.defaults, "metric": metric}
    if job.packing is not None and source.task != "causal-lm":
        raise UsageError(
            f"{job.dataset} is for {source.task}, and only texts of a causal-lm are packed; leave "
            "--packing out."
        )
    _check_of_task(job, source)
    if source.name not in DATASETS:
        own_defaults = dict(family.own_defaults)
        times = max(own_defaults.pop("times", 1), FROM_SCRATCH if job.from_scratch else 1)
        by_rows = ByRows(
            task=source.task,
            modality=source.modality,
            validated=source.validated,
            evaluated=source.evaluated_examples,
            times=times,
        )
        if family.modality == "image" and source.task in ("classification", "detection"):
            own_defaults = {"augment": "crop", **own_defaults}
        common = {name: value for name, value in defaults.items() if name not in LENGTH}
        defaults = {**common, **own_defaults, BY_ROWS: by_rows}
    return replace(family, defaults=defaults), source


def _check_of_task(job: Job, source: Source) -> None:
    """Raises UsageError for settings of embeddings or detection that do not apply to a data set."""
    if source.task != "detection" and job.scales is not None:
        raise UsageError(
            f"scales are for detection, and {job.dataset} is for {source.task}; leave --scales out."
        )
    if source.task == "detection" and (job.compile or job.cuda_graphs):
        raise UsageError(
            "the matcher of objects runs on the host, so that steps are neither compiled nor "
            f"captured; leave {'--compile' if job.compile else '--cuda-graphs'} out."
        )
    embeds, texts = source.task == "embedding", source.modality == "text"
    ranks = embeds and source.classes > 1
    # Directories of runs may have the default, which asks for nothing.
    warm = job.temperature not in (None, TEMPERATURE)
    asked = {
        "pooling of texts": job.pooling is not None and not (embeds and texts),
        "temperature of pairs without scores": warm and not ranks,
        "symmetric of pairs of texts without scores": job.symmetric and not (ranks and texts),
    }
    what = "has pairs with scores" if texts else "has images with texts"
    for given in (given for given, refused in asked.items() if refused):
        name, _, of = given.partition(" of ")
        raise UsageError(
            f"{name} is for embeddings of {of}, and {job.dataset} "
            f"{what if embeds else f'is for {source.task}'}; leave --{name} out."
        )


def _check_class_weights(job: Job, source: Source) -> None:
    """Raises UsageError for class weights that do not suit a data set."""
    if job.class_weights is None:
        return
    if source.task not in ("classification", "segmentation"):
        raise UsageError(
            f"class weights are for tasks with classes, and {job.dataset} is for {source.task}; "
            "leave --class-weights out."
        )
    numbers = weight_numbers(job.class_weights)
    if numbers is not None and len(numbers) != source.classes:
        raise UsageError(
            f"{job.dataset} has {units.count(source.classes, 'class')}, not {len(numbers):,}; give "
            "a class weight for each."
        )


def check(job: Job) -> Source:
    """The data set of a job.

    Raises what `pair` raises, and UsageError for every mistake in the job that can be found before
    a model is loaded.
    """
    family, source = pair(job)
    changes = job.augment not in (None, "none") or job.mixup or job.cutmix
    if changes and family.modality != "image":
        raise UsageError(
            f"{job.model} takes {family.modality}s, which are not augmented; leave --augment, "
            "--mixup and --cutmix out."
        )
    sharp = ("regression", "multi-label", "embedding", "detection")
    if job.label_smoothing and source.task in sharp:
        raise UsageError(
            f"label smoothing spreads a label over classes, and {job.dataset} is for "
            f"{source.task}; leave it out."
        )
    if (job.mixup or job.cutmix) and source.task != "classification":
        raise UsageError(
            f"mixup and cutmix mix the labels of images, and {job.dataset} is for {source.task}; "
            "leave them out."
        )
    job.resolved(family.defaults, source.train_examples)
    return source
