"""The splits of checked rows; some training rows are put aside where there is no validation."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.data import Progress, Splits, place
from razorctl.data.own import images, masks, rows
from razorctl.data.own.labels import Numbers
from razorctl.data.own.raw import Raw
from razorctl.errors import DataError, UsageError
from razorctl.job import Job

if TYPE_CHECKING:
    import numpy as np

SHARE = 0.1  # of the training rows is put aside, unless a job says otherwise


def share(name: str, splits: Collection[str], job: Job) -> float:
    """The share of the training rows that is put aside of data that have these splits.

    Raises UsageError for a share that does nothing, or if nothing is left to evaluate on.
    """
    if "validation" in splits:
        if job.validation is not None:
            raise UsageError(
                f"{name} has a validation split, so nothing is put aside; leave --validation out."
            )
        return 0.0
    if job.validation == 0 and "test" not in splits:
        raise UsageError(
            f"{name} has no validation or test split; give --validation a share such as {SHARE}."
        )
    return SHARE if job.validation is None else job.validation


def held(rows: int, share: float) -> int:
    """How many of so many rows are put aside, unless classes have too few."""
    return max(round(share * rows), int(share > 0))


def aside(labels: "np.ndarray[Any, Any]", share: float, seed: int) -> "np.ndarray[Any, Any]":
    """The positions of `share` of the labels [n], ascending: the same share of each class.

    Largest remainders make up the whole; of equal ones the seed chooses. Each class keeps a label.
    """
    import numpy as np

    draw = np.random.RandomState(seed)  # of the generators the one whose draws never change
    counts = np.bincount(labels)
    quota = share * counts
    most = np.maximum(counts - 1, 0)
    taken = np.minimum(quota.astype(int), most)
    left = held(len(labels), share) - taken.sum()
    for number in np.lexsort((draw.rand(len(counts)), taken - quota)):
        if left > 0 and taken[number] < most[number]:
            taken[number] += 1
            left -= 1
    shuffled = draw.permutation(len(labels))
    grouped = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    ranges = [grouped[start : start + n] for start, n in zip(starts, taken, strict=True)]
    return np.sort(np.concatenate(ranges))


def chosen(
    raw: Raw,
    split: str,
    kept: "np.ndarray[Any, Any]",
    labels: "np.ndarray[Any, Any] | None" = None,
) -> Any:
    """The rows with the numbers in `kept`, as `Splits` has them; labels: of all rows."""
    from datasets import Image

    found = raw.splits[split]
    of_rows = ("image", "mask", "text", "text_pair", "messages")
    found = found.select_columns([name for name in of_rows if name in found.column_names])
    # The labels first: rows are copied when a column is added after some are left out.
    if labels is not None:
        found = found.add_column("label", labels)
    for name in {"image", "mask"} & {*found.column_names}:
        found = found.cast_column(name, Image())
    return found if len(kept) == len(found) else found.select(kept)


@dataclass(frozen=True)
class Checked:
    """Rows with numbered labels, and what is wrong with them as far as it is known."""

    raw: Raw
    job: Job
    classes: tuple[str, ...]
    numbers: Numbers
    faults: rows.Faults

    def put_aside(self, kept: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The training rows to put aside, of those in `kept`; raises DataError if none can be."""
        part = share(self.raw.name, self.raw.splits, self.job)
        if self.raw.cut:
            return kept[-1:]
        found = aside(self.numbers["train"][kept], part, self.job.seed)
        if part and not len(found):
            rows = "row of each class" if self.raw.task == "classification" else "row"
            raise DataError(
                f"{self.raw.name} has one {rows}, so none can be put aside; add rows, or a "
                "validation split."
            )
        away: np.ndarray[Any, Any] = kept[found]
        return away

    def counts(self) -> dict[str, int]:
        """The rows of each split, and of what is put aside, as far as they are known to be good."""
        kept = rows.good(self.numbers, self.faults)
        rows.sound(self.raw, self.classes, self.numbers, kept)
        counts = {split: len(kept[split]) for split in kept}
        counts["aside"] = len(self.put_aside(kept["train"]))
        counts["train"] -= counts["aside"]
        return counts

    def refuse(self, progress: Progress) -> tuple[rows.Faults, tuple[str, ...]]:
        """All bad rows, and a line for each; raises DataError if the job does not skip them."""
        found = {split: dict(bad) for split, bad in self.faults.items()}
        if self.raw.modality == "image":
            for split, bad in images.faults(self.raw, self.faults, progress).items():
                found[split] = dict(sorted({**found[split], **bad}.items()))
        if self.raw.task == "segmentation":
            known = masks.faults(self.raw, self.faults, len(self.classes), progress)
            for split, bad in known.items():
                found[split] = dict(sorted({**bad, **found[split]}.items()))
        return found, rows.refuse(self.raw, found, self.job.skip_bad)

    def load(self, progress: Progress = lambda _: None) -> Splits:
        """The splits; raises DataError for bad rows, and for good ones that are not enough."""
        import numpy as np

        found, skipped = self.refuse(progress)
        kept = rows.good(self.numbers, found)
        rows.sound(self.raw, self.classes, self.numbers, kept)
        away = self.put_aside(kept["train"])
        if len(away):
            kept = {**kept, "train": np.setdiff1d(kept["train"], away)}
        return Splits(
            self._rows("train", kept["train"]),
            self._rows("train", away) if len(away) else self._part("validation", kept),
            self._part("test", kept),
            self.classes,
            skipped,
            self._record(away, found) if len(away) or skipped else None,
        )

    def _part(self, split: str, kept: Numbers) -> Any:
        return self._rows(split, kept[split]) if split in kept else None

    def _rows(self, split: str, kept: "np.ndarray[Any, Any]") -> Any:
        labeled = self.raw.task == "classification"
        return chosen(self.raw, split, kept, self.numbers[split] if labeled else None)

    def _record(self, away: "np.ndarray[Any, Any]", found: rows.Faults) -> dict[str, Any]:
        """What the run directory says of the rows, which are counted from 0 as they are stored."""
        return {
            "dataset": place(self.raw.name),
            "split": self.raw.names["train"],
            "validation": share(self.raw.name, self.raw.splits, self.job),
            "seed": self.job.seed,
            "rows": away.tolist(),
            "skipped": {self.raw.names[split]: list(bad) for split, bad in found.items() if bad},
        }
