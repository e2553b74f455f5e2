"""A request for data: which, what for, and which of their splits and columns."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from razorctl import models
from razorctl.config import mask_classes
from razorctl.config.job import Job
from razorctl.config.mask_classes import MaskClasses
from razorctl.config.tasks import LANGUAGE, Task
from razorctl.errors import UsageError

STDIN = "-"  # the name of standard input
SHARE = 0.1  # of the training rows is held out, unless a job says otherwise
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


@dataclass(frozen=True)
class DataRequest:
    """The part of a job that its data depend on, with fields of `Job` and four others.

    name: of the data, in sentences. trained: the request of a finished run, whose columns are used
    where tables have them; None without a run. classes: the class names of that run; they are
    classes even if they look like no label, such as NA.
    """

    name: str
    model: str
    task: str | None = None
    column: str | None = None
    image_column: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    mask_values: str | None = None
    mask_colors: str | None = None
    box_format: str | None = None
    split: str | None = None
    validation: float | None = None
    max_rows: int | None = None
    skip_bad: bool = False
    seed: int = 0
    trained: Optional["DataRequest"] = None
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: Job, trained: Job | None = None, **changes: Any) -> "DataRequest":
        """The request of a job. trained: the job of a finished run. changes: of fields."""
        shared = {field.name for field in fields(cls)} & {field.name for field in fields(Job)}
        values = {name: getattr(job, name) for name in shared}
        run = None if trained is None else cls.of(trained)
        return cls(**{"name": job.dataset, "trained": run, **values, **changes})

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """The tasks that the data may be for: the job's, or all of the model, its usual one first.

        For an unknown name of a model it is classification; the look-up of the model refuses it.
        """
        if self.task is not None:
            return (self.task,)  # type: ignore[return-value]
        try:
            return models.named(self.model).tasks
        except UsageError:
            return ("classification",)

    @cached_property
    def embeds(self) -> models.Modality | None:
        """What the model embeds: texts, or images with texts; None if the data are not for that."""
        if "embedding" not in self.tasks:
            return None
        try:
            return models.named(self.model).modality
        except UsageError:
            return None

    @property
    def language(self) -> Task | None:
        """The first of the tasks that models language; None if there is none."""
        return next((task for task in self.tasks if task in LANGUAGE), None)

    @cached_property
    def most_objects(self) -> int | None:
        """The most objects that the model finds in an image; None for no limit."""
        try:
            model = models.find(self.model, "detection")
        except UsageError:
            return None
        return getattr(model, "most_objects", None)

    @property
    def columns(self) -> bool:
        """Whether an option names a column."""
        return any((self.column, self.image_column, self.text_column, self.label_column))

    @property
    def mask_classes(self) -> MaskClasses | None:
        """The classes of masks by the job, or else by the finished run; None if neither has any."""
        for text, colors in ((self.mask_values, False), (self.mask_colors, True)):
            if text is not None:
                return mask_classes.parse(text, colors)
        return None if self.trained is None else self.trained.mask_classes

    def splits(self, names: Collection[str], *, single: bool = False) -> dict[str, str]:
        """`train`, `validation` and `test`, if they are used -> the name in the data.

        names: all splits in the data. single: whether an only split is for training, even if it is
        called test. Raises UsageError if one that --split names is absent, or if it is not clear
        which one to use.
        """
        if self.split is not None:
            return self._named_splits(names, self.split)
        if len(names) == 1 and (single or not any(map(role, names))):
            return {"train": next(iter(names))}
        of = role if "train" in map(role, names) else role_in
        splits: dict[str, str] = {}
        for name in names:
            split = of(name)
            if split is not None and splits.setdefault(split, name) != name:
                raise UsageError(
                    f"{self.name} has the splits {splits[split]} and {name}, which are the same; "
                    "choose with --split."
                )
        if "train" not in splits:
            raise UsageError(
                f"none of the splits of {self.name} is called train, only {', '.join(names)}; name "
                "those to use with --split train,validation,test."
            )
        return {split: splits[split] for split in SPLIT_NAMES if split in splits}

    def _named_splits(self, names: Collection[str], option: str) -> dict[str, str]:
        parts: Sequence[str] = [part.strip() for part in option.split(",")]
        present = [part for part in parts if part]
        if not parts[0] or len(parts) > 3 or len(set(present)) < len(present):
            raise UsageError(
                f"split {option!r} does not name up to three splits; give train,validation,test."
            )
        for part in present:
            if part not in names:
                raise UsageError(
                    f"{self.name} has no split {part}, only {', '.join(names)}; name others with "
                    "--split."
                )
        return {split: part for split, part in zip(SPLIT_NAMES, parts, strict=False) if part}

    def share(self, splits: Collection[str]) -> float:
        """The share of the training rows that is held out of data that have these splits.

        Raises UsageError for a share that does nothing, or if nothing is left to evaluate on.
        """
        if "validation" in splits:
            if self.validation is not None:
                raise UsageError(
                    f"{self.name} has a validation split, so nothing is held out; leave "
                    "--validation out."
                )
            return 0.0
        if self.validation == 0 and "test" not in splits:
            raise UsageError(
                f"{self.name} has no validation or test split; give --validation a share such "
                f"as {SHARE}."
            )
        return SHARE if self.validation is None else self.validation

    def check_texts(self, count: int) -> None:
        """Raises UsageError if fewer rows are wanted of a single text. count: of training texts."""
        if self.max_rows is not None and count == 1:
            raise UsageError(
                f"{self.name} has one text to train on, of which no rows can be left out; leave "
                "--max-rows out, and give --steps for a shorter run."
            )


def role(name: str) -> str | None:
    """The split that has this name or a synonym: `dev` is validation; None for other names."""
    return next((split for split in SPLIT_NAMES if name.casefold() in SPLIT_NAMES[split]), None)


def role_in(name: str) -> str | None:
    """The split that one word of a name stands for, as in seg_train; None if none or several do."""
    words = (word.casefold().removesuffix("set") for word in WORD.findall(name))
    roles = {split for word in words if (split := role(word))}
    return roles.pop() if len(roles) == 1 else None


def split_of(file: Path) -> str:
    """The split of a file by its name, without the number of a part: `train` for train-00000."""
    word = file.stem.replace("_", "-").split("-")[0].split(".")[0]
    return word if role(word) else file.stem
