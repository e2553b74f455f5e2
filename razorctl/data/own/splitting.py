"""Checks rows and makes `Splits`; holds training rows out where there is no validation split."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import CLASSED, LANGUAGE
from razorctl.data.catalog import place
from razorctl.data.own import boxes, contents, images, masks, rows, targets
from razorctl.data.own.held_out import image_numbers, limited, stratified, whole_images
from razorctl.data.own.images import Findings
from razorctl.data.own.labels import no_labels
from razorctl.data.own.raw import Faults, RawRows, inputs_in, skip_or_refuse
from razorctl.data.own.request import SPLIT_NAMES, DataRequest
from razorctl.data.own.targets import Good, Targets
from razorctl.data.source import Splits
from razorctl.errors import DataError, UsageError
from razorctl.models import Progress
from razorctl.models.images import white

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


def select_rows(
    raw: RawRows, split: str, numbers: "np.ndarray[Any, Any]", **columns: Any
) -> "Dataset":
    """The rows with these numbers, as in `Splits`; columns: further columns, for all rows.

    A column is of NumPy, with an array or a list for each row, or of Arrow.
    """
    from razorctl.data.own.decoding import as_images

    rows = raw.splits[split]
    rows = rows.select_columns(inputs_in(rows))
    # Before rows are left out: they are copied when a column is added after that.
    for name, values in columns.items():
        rows = rows.add_column(name, values if _is_flat(values) else list(values))
    rows = as_images(rows)
    return rows if len(numbers) == len(rows) else rows.select(numbers)


def _is_flat(values: Any) -> bool:
    """Whether a column is of Arrow, or of one number for each row."""
    return not hasattr(values, "ndim") or (values.ndim == 1 and values.dtype != object)


@dataclass(frozen=True)
class Inspection:
    """The faults of rows after all images and masks were read.

    skipped: a line for each row that is left out. images, masks: the results of `images.findings`
    and `masks.findings`; empty for rows without any. boxes: split -> the boxes of each row, and
    crowds of these: as in `Splits`.
    """

    faults: Faults
    skipped: tuple[str, ...]
    images: Findings
    masks: Findings
    boxes: Mapping[str, Any] = field(default_factory=dict)
    crowds: Mapping[str, Any] = field(default_factory=dict)

    @property
    def white(self) -> int | None:
        """The level of white, by the training rows if one of them has an image in WIDE modes.

        Otherwise other splits decide; None if no image is in these modes.
        """
        tops = [images.highest(self.images[split]) for split in SPLIT_NAMES if split in self.images]
        return next((white(top) for top in tops if top is not None), None)

    def contents(self, split: str, rows: Any) -> "np.ndarray[Any, Any]":
        """The content of each row of a split, without its mask; 0 for bad images without texts."""
        import numpy as np

        if split not in self.images:
            return contents.row_contents(rows)
        values = self.image_contents(split, len(rows))
        if "text" not in rows.column_names:
            return values
        both = zip(values.tolist(), rows.data.column("text").to_pylist(), strict=True)
        return np.array([contents.row_content(row) for row in both], np.int64)

    def image_contents(self, split: str, rows: int) -> "np.ndarray[Any, Any]":
        """The content of the image of each row; 0 for bad images."""
        import numpy as np

        values = np.zeros(rows, np.int64)
        for row, (_, content, *_) in self.images[split].items():
            values[row] = content
        return values

    def digest(
        self,
        split: str,
        numbers: "np.ndarray[Any, Any]",
        contents_of: rows.Contents,
        labels: Targets,
    ) -> str:
        """The digest of rows by their contents, and by their labels, boxes or masks' contents."""
        values: Any = labels.labels.get(split, labels.numbers[split])[numbers]
        if split in self.masks:
            values = [self.masks[split][row][2] for row in numbers]
        for column in (of[split] for of in (self.boxes, self.crowds) if of):
            values = [*zip(values, column.take(numbers).to_pylist(), strict=True)]
        return contents.digest(contents_of[split][numbers], values)


@dataclass(frozen=True)
class SplitRows:
    """Rows with their labels, and the faults that need no look at images.

    findings: the results of `images.findings`; empty if images were not read yet.
    """

    request: DataRequest
    raw: RawRows
    targets: Targets
    faults: Faults
    findings: Findings = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.targets.classes

    def hold_out(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The numbers of the training rows to hold out; raises DataError if none can be.

        rows: the numbers of good rows.
        """
        share = self.request.share(self.raw.splits)
        if self.raw.cut:
            return rows[-1:]
        draw = whole_images if self.raw.captioned else stratified
        numbers = image_numbers(self.raw) if self.raw.captioned else self.targets.numbers["train"]
        positions = draw(numbers[rows], share, self.request.seed)
        if share and not len(positions):
            one = "row of each class" if self.raw.task == "classification" else "row"
            one = "image" if self.raw.captioned else one
            raise DataError(
                f"{self.raw.name} has one {one}, so none can be held out; add rows, or a "
                "validation split."
            )
        held_out: np.ndarray[Any, Any] = rows[positions]
        return held_out

    def used(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The numbers of the rows to train on; rows: of good ones that are not held out."""
        labels = self.targets.numbers["train"][rows]
        of: np.ndarray[Any, Any] = rows[limited(labels, self.request.max_rows, self.request.seed)]
        return of

    def counts(self) -> dict[str, int]:
        """The number of good rows of each split, and of rows to hold out."""
        good = self._enough(self.faults)
        counts = {split: len(of) for split, of in good.items()}
        counts["held out"] = len(self.hold_out(good["train"]))
        left = counts["train"] - counts["held out"]
        counts["train"] = min(left, self.request.max_rows or left)
        return counts

    def _enough(self, faults: Faults) -> Good:
        """Split -> the good rows; raises DataError if they are not enough."""
        good = rows.good(self.targets.numbers, faults)
        for split, numbers in good.items():
            if not len(numbers) and faults.get(split):  # all rows are bad
                bad = [*self.raw.with_places({split: faults[split]})]
                skip_or_refuse(self.raw.name, bad, skip_bad=False)
        rows.check_enough(self.raw, self.targets, good)
        targets.check(self.raw, self.targets, good)
        return good

    def inspect(self, progress: Progress) -> Inspection:
        """Reads the images and masks of all rows; raises DataError for bad ones, or skips them."""
        faults = {split: dict(bad) for split, bad in self.faults.items()}
        on_images: Findings = {}
        on_masks: Findings = {}
        if self.raw.modality == "image":
            on_images = self.findings or images.findings(self.raw, self.faults, progress)
            for split, bad in images.image_faults(on_images).items():
                faults[split] = dict(sorted({**faults[split], **bad}.items()))
        if self.raw.task == "segmentation":
            on_masks = masks.findings(self.raw, self.faults, progress)
            for split, bad in masks.mask_faults(self.raw, on_masks).items():
                faults[split] = dict(sorted({**bad, **faults[split]}.items()))
        in_pixels: Mapping[str, Any] = {}
        if self.raw.task == "detection":
            bad_boxes, in_pixels = boxes.in_pixels(self.raw, on_images)
            for split, bad in bad_boxes.items():
                faults[split] = dict(sorted({**bad, **faults[split]}.items()))
        lines = [*self.raw.nowhere, *self.raw.with_places(faults)]
        every = sum(map(len, self.raw.splits.values())) + len(self.raw.nowhere)
        skipped = skip_or_refuse(self.raw.name, lines, self.request.skip_bad, every)
        crowds = boxes.crowds(self.raw) if in_pixels else {}
        return Inspection(faults, skipped, on_images, on_masks, in_pixels, crowds)

    def load(self, progress: Progress = lambda _: None) -> Splits:
        """The splits; raises DataError for bad rows, and if too few rows are good."""
        import numpy as np

        inspection = self.inspect(progress)
        good = self._enough(inspection.faults)
        held_out = self.hold_out(good["train"])
        parts = {split: (split, numbers) for split, numbers in good.items()}
        parts["train"] = "train", self.used(np.setdiff1d(good["train"], held_out))
        if len(held_out):
            parts["validation"] = "train", held_out
        contents_of = {
            split: inspection.contents(split, of) for split, of in self.raw.splits.items()
        }
        data = {part: self.data(*of, inspection) for part, of in parts.items()}
        changed = bool(len(held_out) or inspection.skipped)
        return Splits(
            train=data["train"],
            validation=data.get("validation"),
            test=data.get("test"),
            classes=self.classes,
            skipped=inspection.skipped,
            record=self._record(held_out, inspection.faults) if changed else None,
            digests={
                part: inspection.digest(split, numbers, contents_of, self.targets)
                for part, (split, numbers) in parts.items()
            },
            white=inspection.white,
            mask_classes="" if self.request.mask_classes else self.raw.mask_classes,
            box_format=self.raw.found_format,
            notes=(
                *rows.notes(self.raw, self.targets, parts, contents_of),
                *targets.notes(self.raw, self.targets, parts["train"][1]),
            ),
        )

    def data(
        self, split: str, numbers: "np.ndarray[Any, Any]", inspection: Inspection
    ) -> "Dataset":
        """The rows of a split with these numbers, as in `Splits`."""
        import numpy as np

        of = {"label": self.targets.labels, "boxes": inspection.boxes, "crowd": inspection.crowds}
        columns = {name: values[split] for name, values in of.items() if values}
        count = len(self.raw.splits[split])
        if self.raw.captioned:
            columns["image_id"] = inspection.image_contents(split, count)
        if inspection.white is not None:
            columns["white"] = np.full(count, inspection.white)
        if self.raw.mask_classes:
            columns["mask_classes"] = np.full(count, self.raw.mask_classes)
        return select_rows(self.raw, split, numbers, **columns)

    def _record(self, held_out: "np.ndarray[Any, Any]", faults: Faults) -> dict[str, Any]:
        """The record of `Splits`, for the run directory; rows are counted from 0."""
        return {
            "dataset": place(self.raw.name),
            "split": self.raw.names["train"],
            "validation": self.request.share(self.raw.splits),
            "seed": self.request.seed,
            "rows": held_out.tolist(),
            "skipped": {self.raw.names[split]: list(bad) for split, bad in faults.items() if bad},
        }


def check_rows(request: DataRequest, raw: RawRows) -> SplitRows:
    """The rows with their labels and faults.

    Raises DataError for bad rows, if the request does not skip them, and for an empty split.
    """
    for split, name in raw.names.items():
        if not len(raw.splits[split]):
            raise DataError(f"{name} of {raw.name} has no rows; add some, or name other splits.")
    if raw.task != "segmentation" and (request.mask_values or request.mask_colors):
        raise UsageError(f"{raw.name} has no masks; leave --mask-values and --mask-colors out.")
    raw = boxes.settled(raw, request)
    if raw.task in LANGUAGE:
        request.check_texts(len(raw.splits["train"]))
        raw = _divided(request, raw)
    elif raw.task == "segmentation":
        raw = masks.with_classes(raw, request)
    findings: Findings = {}
    if request.skip_bad and raw.modality == "image" and raw.task in CLASSED:
        # Before labels are read, as labels of bad images make no classes.
        findings = images.findings(raw, rows.faults(raw), lambda _: None)
    checked_rows = SplitRows(request, raw, *read_labels(request, raw, findings), findings)
    if not request.skip_bad and (any(checked_rows.faults.values()) or raw.nowhere):
        checked_rows.inspect(lambda _: None)
    return checked_rows


def read_labels(request: DataRequest, raw: RawRows, findings: Findings) -> tuple[Targets, Faults]:
    """The labels of rows, with the classes of good rows, and the faults of all rows.

    findings: as in `SplitRows`.
    """
    raw = replace(raw, sorted=raw.sorted or bool(no_labels(request.classes)))
    of_images = images.image_faults(findings)
    bad = {split: {**of_images.get(split, {}), **bad} for split, bad in rows.faults(raw).items()}
    if raw.task == "detection":
        for split, of_boxes in boxes.faults(raw, request.most_objects).items():
            bad[split] = {**of_boxes, **bad[split]}
    labels = targets.targets_of(raw, bad)
    return labels, rows.with_unlabeled(raw, bad, labels)


def _divided(request: DataRequest, raw: RawRows) -> RawRows:
    """The rows; a single training text is cut into two rows if its end is to be held out.

    The cut is at a line break, or else at a space. Raises DataError if there is neither.
    """
    import pyarrow as pa
    from datasets import Dataset

    train = raw.splits["train"]
    part = request.share(raw.splits)
    if "text" not in train.column_names or len(train) != 1 or not part:
        return raw
    text = train[0]["text"] or ""
    at = _cut(text, part)
    if at is None:
        if not text.strip():
            return raw  # which is bad
        raise DataError(
            f"{raw.name} has one text without a line break, so none of it can be held out; add "
            "texts, or a validation split."
        )
    places = [raw.place("train", 0), f"the end of {raw.place('train', 0)}"]
    kind = pa.large_string()
    table = pa.table({"text": pa.array([text[:at], text[at:].lstrip()], kind), "place": places})
    return replace(raw, splits={**raw.splits, "train": Dataset(table)}, cut=True)


def _cut(text: str, share: float) -> int | None:
    """The position where about `share` of a text is left; None if it cannot be cut."""
    middle = min(max(round(len(text) * (1 - share)), 1), len(text))
    for mark in ("\n", " "):
        marks = [text.rfind(mark, 0, middle), text.find(mark, middle)]
        cuts = [at for at in marks if at > 0 and text[:at].strip() and text[at:].strip()]
        if cuts:
            return min(cuts, key=lambda at: abs(at - middle))
    return None


def digested(splits: Splits) -> Splits:
    """The splits with their digests, which are computed if there are none."""
    if splits.digests is not None:
        return splits
    digests = {}
    for split, data in splits.parts.items():
        digests[split] = contents.digest(contents.row_contents(data), contents.labels_in(data))
    return replace(splits, digests=digests)
