"""Boxes in images: the format of their four numbers, and their faults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.config.job import BOX_FORMATS
from razorctl.data.own import images
from razorctl.data.own.images import Findings
from razorctl.data.own.raw import RawRows, content
from razorctl.data.own.request import DataRequest
from razorctl.errors import DataError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

LOOKED_AT = 300  # images whose sizes tell the format of boxes
MISFITS = 0.02  # share of boxes that may lie outside of their images in a format that fits
# What a box may exceed its image by, from rounding: pixels, or a share of the image's side.
PIXELS, SHARE = 1.0, 0.005
ORDERS = {
    "xywh": "left, top, width and height",
    "xyxy": "left, top, right and bottom",
    "cxcywh": "center, width and height",
}


@dataclass(frozen=True)
class Boxes:
    """The boxes of a split: values [boxes, 4], and the number of boxes of each row [rows]."""

    values: "np.ndarray[Any, Any]"
    counts: "np.ndarray[Any, Any]"

    @classmethod
    def of(cls, raw: RawRows, split: str) -> "Boxes":
        """Corners, if the format of the rows is known; else the values of the files."""
        import numpy as np
        import pyarrow.compute as pc

        found, counts = _parts(raw, split, "box")
        values = np.asarray(pc.list_flatten(found).to_numpy(), np.float64).reshape(-1, 4)
        return cls(corners(values, raw.box_format), counts)

    @property
    def rows(self) -> "np.ndarray[Any, Any]":
        """The row of each box."""
        import numpy as np

        return np.repeat(np.arange(len(self.counts)), self.counts)

    def first(self, bad: Any) -> Iterator[tuple[int, int, int]]:
        """Each row with a bad box: its number, and the number of that box there and among all.

        bad: whether each box is bad, [boxes].
        """
        import numpy as np

        at = np.flatnonzero(bad)
        of, first = np.unique(self.rows[at], return_index=True)
        starts = np.cumsum(self.counts) - self.counts
        for row, box in zip(of.tolist(), at[first].tolist(), strict=True):
            yield row, int(box - starts[row]), box

    def lists(self) -> "pa.Array":
        """The boxes of each row, as lists of lists."""
        import numpy as np
        import pyarrow as pa

        of_each = np.full(len(self.values), 4)
        return _lists(self.counts, _lists(of_each, pa.array(self.values.ravel())))


def _parts(raw: RawRows, split: str, name: str) -> tuple[Any, "np.ndarray[Any, Any]"]:
    """A part of all objects of a split, and the number of objects of each row [rows]."""
    import pyarrow.compute as pc

    column = raw.splits[split].data.column("objects")
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    return pc.struct_field(pc.list_flatten(column), name), counts


def _lists(counts: "np.ndarray[Any, Any]", values: "pa.Array") -> "pa.Array":
    """Lists of so many of the values each."""
    import numpy as np
    import pyarrow as pa

    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(ends, values)


def corners(values: "np.ndarray[Any, Any]", box_format: str) -> "np.ndarray[Any, Any]":
    """Boxes [n, 4] of a format as left, top, right, bottom; any other format stays."""
    import numpy as np

    first, second = values[:, :2], values[:, 2:]
    if box_format == "xywh":
        return np.concatenate([first, first + second], 1)
    if box_format == "cxcywh":
        return np.concatenate([first - second / 2, first + second / 2], 1)
    return values


def settled(raw: RawRows, request: DataRequest) -> RawRows:
    """The rows with the format of their boxes.

    It is what the request says, or else what fits the sizes of the first training images. Raises
    UsageError if data have no boxes or say their format themselves, and the request does too, and
    DataError if it is not clear, and for shares of an image where its pixels are counted.
    """
    said = request.box_format
    if said is not None and (raw.task != "detection" or raw.box_format):
        why = "says the format of its boxes" if raw.task == "detection" else "has no boxes"
        raise UsageError(f"{raw.name} {why}; leave --box-format out.")
    if raw.task != "detection":
        return raw
    shares = raw.shares or _are_shares(raw)
    if raw.box_format:
        return raw
    split = next(iter(raw.splits))
    boxes = Boxes.of(raw, split)
    said = said or (request.trained.box_format if request.trained else None)
    if said is not None or not len(boxes.values):
        return replace(raw, box_format=said or "xywh", shares=shares)
    return _fitting(raw, boxes, None if shares else _sizes(raw, split, boxes))


def _are_shares(raw: RawRows) -> bool:
    """Whether boxes are shares of their images: none has a number above 1.

    Raises DataError if that is so of most boxes of a split, and others or the format have pixels.
    """
    import numpy as np

    total = small = 0
    mixed = False
    for split in raw.splits:
        values = Boxes.of(raw, split).values
        within = (values[np.isfinite(values).all(1)] <= 1 + 2 * SHARE).all(1)
        total, small = total + len(within), small + int(within.sum())
        mixed |= 2 * int(within.sum()) > len(within)
    shares = 0 < small == total
    if mixed and (raw.box_format or not shares):
        raise DataError(
            f"{small:,} of {units.count(total, 'box')} in {raw.name} end within one pixel, as if "
            "they were shares of the image; give all of them in pixels."
        )
    return shares


def _sizes(raw: RawRows, split: str, boxes: Boxes) -> Mapping[int, tuple[int, int]]:
    """Row -> width and height, of the first images with boxes whose headers can be read."""
    column = raw.splits[split].data.column("image")
    stored = ((row, content(column[row].as_py())) for row in boxes.counts.nonzero()[0].tolist())
    first = islice(stored, LOOKED_AT)
    sizes = ((row, images.size_of(raw.root, image)) for row, image in first)
    return {row: size for row, size in sizes if size is not None}


def _fitting(raw: RawRows, boxes: Boxes, sizes: Mapping[int, tuple[int, int]] | None) -> RawRows:
    """The rows with the one format in which boxes fit their images; DataError if none clearly does.

    sizes: as `_sizes` returns them; None for shares of an image.
    """
    import numpy as np

    if sizes is None:
        values, limits = boxes.values, np.ones((len(boxes.values), 2))
    else:
        known = np.isin(boxes.rows, [*sizes])
        values = boxes.values[known]
        limits = np.array([sizes[row] for row in boxes.rows[known].tolist()]).reshape(-1, 2)
    misfits = {}
    for name in BOX_FORMATS:
        read = corners(values, name)
        fits = ((read[:, 2:] > read[:, :2]) & ~_outside(read, limits)).all(1)
        misfits[name] = int((~fits).sum())
    fitting = [name for name in BOX_FORMATS if misfits[name] <= MISFITS * len(values)]
    best = min(BOX_FORMATS, key=lambda name: misfits[name])  # of equal ones the first: COCO's
    # Boxes of COCO in the middle of images fit as boxes by their centers, too.
    unclear = len(fitting) > 1 and not (best == "xywh" and fitting == ["xywh", "cxcywh"])
    if not len(values) or not fitting or unclear:
        why = ", ".join(f"{misfits[name]:,} with {name} ({ORDERS[name]})" for name in BOX_FORMATS)
        raise DataError(
            f"the format of the boxes in {raw.name} is not clear: of {len(values):,} boxes, the "
            f"number outside of their images is {why}; give --box-format."
        )
    note = f"boxes in {raw.name} are read as {ORDERS[best]}, which fits their images"
    note += ", as shares of width and height" * (sizes is None)
    usual = best == "xywh" and sizes is not None
    notes = raw.notes if usual else (*raw.notes, f"{note}; change that with --box-format.")
    found = replace(raw, box_format=best, found_format=best)
    return replace(found, shares=sizes is None, notes=notes)


def _outside(
    read: "np.ndarray[Any, Any]", limits: "np.ndarray[Any, Any]"
) -> "np.ndarray[Any, Any]":
    """Whether corners [n, 4] exceed images of these sizes [n, 2], by more than rounding; [n, 2]."""
    import numpy as np

    slack = np.maximum(np.where(limits > 1, PIXELS, 0), SHARE * limits)
    return np.asarray((read[:, :2] < -slack) | (read[:, 2:] > limits + slack))


def faults(raw: RawRows, most: int | None) -> dict[str, dict[int, str]]:
    """Split -> row -> the fault of its boxes that needs no look at the image.

    raw: with the format of boxes. most: boxes that the model finds in an image at most.
    """
    import numpy as np

    every: dict[str, dict[int, str]] = {}
    for split in raw.splits:
        boxes, bad = Boxes.of(raw, split), dict[int, str]()
        with np.errstate(invalid="ignore"):  # of infinite ones
            sides = boxes.values[:, 2:] - boxes.values[:, :2]
        infinite = ~np.isfinite(boxes.values).all(1)
        causes = [
            (infinite, "a box that is not finite"),
            (~infinite & (sides < 0).any(1), "a right or bottom side before the left or top one"),
            (~infinite & (sides == 0).any(1), "a box without area"),
        ]
        for which, reason in causes:
            for row, number, _ in boxes.first(which):
                bad.setdefault(row, f"{mark(raw, split, row, number)}: {reason}")
        for row in np.flatnonzero(boxes.counts > (most or np.inf)).tolist():
            bad[row] = f"{boxes.counts[row]:,} boxes, and the model finds at most {most:,}"
        every[split] = bad
    return every


def mark(raw: RawRows, split: str, row: int, number: int) -> str:
    """The name of a box of a row in its file, such as `annotation 17`."""
    mark = raw.splits[split].data.column("objects")[row].as_py()[number]["mark"]
    return mark or f"box {number + 1}"


def in_pixels(
    raw: RawRows, findings: Findings
) -> tuple[dict[str, dict[int, str]], dict[str, "pa.Array"]]:
    """The faults of boxes by the sizes of images, and the boxes as in `Splits`, both by splits.

    A box that rounding has put outside is cut at the image's border. findings: the results of
    `images.findings`; rows without a result have no fault here.
    """
    import numpy as np

    faults, lists = {}, {}
    for split, looked in findings.items():
        boxes, bad = Boxes.of(raw, split), dict[int, str]()
        sizes = np.full((len(boxes.counts), 2), np.nan)
        for row, (fault, _, _, size) in looked.items():
            sizes[row] = (np.nan, np.nan) if fault else size
        bad |= _other_sizes(raw, split, sizes)
        limits = sizes[boxes.rows]
        values = boxes.values * (np.tile(limits, 2) if raw.shares else 1)
        for row, number, box in boxes.first(_outside(values, limits).any(1)):
            width, height = sizes[row].astype(int)
            right, bottom = values[box, 2:]
            left, top = values[box, :2]
            bad.setdefault(
                row,
                f"{mark(raw, split, row, number)}: a box from {left:g}, {top:g} to {right:g}, "
                f"{bottom:g}, outside of {width} x {height} pixels",
            )
        cut = np.clip(values, 0, np.tile(limits, 2))
        gone = np.asarray((cut[:, 2:] <= cut[:, :2]).any(1))  # not where the size is unknown
        for row, number, _ in boxes.first(gone):
            bad.setdefault(row, f"{mark(raw, split, row, number)}: a box outside of its image")
        faults[split], lists[split] = bad, Boxes(cut, boxes.counts).lists()
    return faults, lists


def _other_sizes(raw: RawRows, split: str, sizes: "np.ndarray[Any, Any]") -> dict[int, str]:
    """The rows whose files say another size of the image than it has."""
    rows, bad = raw.splits[split], dict[int, str]()
    said = rows.data.column("size").to_pylist() if "size" in rows.column_names else []
    for row, (given, size) in enumerate(zip(said, sizes.tolist(), strict=False)):
        if given and size[0] == size[0] and given != size:  # NaN is of an image that is bad
            turned = ", turned by its EXIF orientation" * (given == size[::-1])
            width, height = map(int, size)
            bad[row] = (
                f"boxes for {given[0]} x {given[1]} pixels, and the image has {width} x {height}"
                f"{turned}"
            )
    return bad


def total(raw: RawRows) -> int:
    """The number of boxes in all splits."""
    return sum(len(Boxes.of(raw, split).values) for split in raw.splits)


def crowds(raw: RawRows) -> Mapping[str, "pa.Array"]:
    """Split -> for each row a list with 1 for each crowd, 0 for others; empty without crowds."""
    import pyarrow as pa

    flags = {split: _parts(raw, split, "crowd") for split in raw.splits}
    lists = {
        split: _lists(counts, pa.array(of.to_numpy(), pa.int64()))
        for split, (of, counts) in flags.items()
    }
    return lists if any(of.to_numpy().any() for of, _ in flags.values()) else {}


def labels_of(raw: RawRows, split: str) -> list[list[str | None]]:
    """The classes of the boxes of each row, by name or number."""
    labels, counts = _parts(raw, split, "label")
    each = iter(labels.to_pylist())
    return [[*islice(each, count)] for count in counts.tolist()]
