"""Objects in images as files have them: a box and a class each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from razorctl import units

if TYPE_CHECKING:
    import pyarrow as pa

# The names, in struct columns, of the box, of the class, and of the mark of a crowd; the first one
# that exists counts.
BOX = ("bbox", "bboxes", "box", "boxes", "bounding_box", "bounding_boxes")
CLASS: Sequence[str] = (
    *("category", "categories", "label", "labels", "category_name", "class_name", "name"),
    *("category_id", "class", "class_id", "classes"),
)
LARGEST = 1 << 40  # of the numbers of a box; others are as bad as infinite ones
CROWD = ("iscrowd", "is_crowd", "crowd")


def kind() -> "pa.DataType":
    """The Arrow type of the `objects` of a row.

    An object has the four numbers of its `box`, the name or the number of its class as a `label`,
    whether it is a `crowd`, and a `mark`, which names it in its file.
    """
    import pyarrow as pa

    parts = [("box", pa.list_(pa.float64())), ("label", pa.string())]
    return pa.list_(pa.struct([*parts, ("crowd", pa.bool_()), ("mark", pa.string())]))


def listed(box: Any, label: str | None, crowd: bool = False, mark: str | None = None) -> Any:
    """An object as `kind` has it; raises ValueError if the box is not four numbers."""
    if not isinstance(box, Sequence) or isinstance(box, str) or len(box) != 4:
        raise ValueError("no box of four numbers")
    numbers = [float("nan") if side is None else side for side in box]
    if any(isinstance(side, bool) or not isinstance(side, (int, float)) for side in numbers):
        raise ValueError("no box of four numbers")
    if any(abs(side) > LARGEST for side in numbers):
        numbers = [float("inf")] * 4  # which is reported
    return {"box": [*map(float, numbers)], "label": label, "crowd": crowd, "mark": mark}


def part(value: Any, names: Sequence[str]) -> Any:
    """The value with the first of these names in an object, or in lists of all; else None."""
    return next((value[name] for name in names if name in value), None)


def are_in(values: Sequence[Any], names: Sequence[str] = BOX) -> bool:
    """Whether most values, of a column, are structs of lists with one of `names`, or such lists."""
    first = [value[0] if isinstance(value, list) and value else value for value in values]
    having = [one for one in first if isinstance(one, Mapping) and {*names} & {*one}]
    filled = [one for one in first if one != []]
    return bool(having) and 2 * len(having) > len(filled)


def of_value(value: Any, column: str) -> tuple[list[Any], str | None]:
    """The objects of a row, and their fault or None.

    value: a list of objects, or an object with lists of all boxes and classes; None is no object.
    """
    every: list[Any]
    if value is None or isinstance(value, list):
        every = [
            [part(one, names) for names in (BOX, CLASS, CROWD)] if isinstance(one, dict) else []
            for one in value or ()
        ]
    elif isinstance(value, dict):
        lists = [part(value, names) for names in (BOX, CLASS, CROWD)]
        boxes, classes = (each if isinstance(each, list) else [] for each in lists[:2])
        if len(boxes) != len(classes):
            return [], f"{units.count(len(boxes), 'box')} and {units.count(len(classes), 'class')}"
        every = [*zip(boxes, classes, lists[2] or [None] * len(boxes), strict=False)]
    else:
        return [], f"the {column} {str(value)[:40]!r} has no boxes"
    found = []
    for number, object_ in enumerate(every, 1):
        if not object_:
            return [], f"box {number}: no box of four numbers"
        box, label, crowd = object_
        if (text := _class(label)) is None:
            return [], f"box {number}: no class"
        try:
            found.append(listed(box, text, bool(crowd)))
        except ValueError as error:
            return [], f"box {number}: {error}"
    return found, None


def _class(value: Any) -> str | None:
    """The name or the number of a class as text; None if it is neither."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (bool, float)) or not isinstance(value, (str, int)):
        return None
    return str(value).strip() or None
