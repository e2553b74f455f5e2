"""Recognizes the columns of images and of boxes with a class each."""

from razorctl.data.own import objects
from razorctl.data.own.read.table import Table
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.errors import UsageError


def columns_of(table: Table) -> TableColumns | None:
    """The columns of images and of boxes with a class each; None if not clear.

    Raises UsageError, for a model that finds objects, if boxes have no class.
    """
    labels = table.label_options or [*table.columns.values()]
    boxes = [column for column in labels if objects.are_in(column.present)]
    found = table.only(boxes, "column of boxes", "label-column")
    image = None if found is None else table.image_option or table.image([found])
    if found is None or image is None:
        return None
    if "detection" not in table.request.tasks:
        labeled = table.may_have_label([image, found])
        return None if labeled else TableColumns.of("detection", image=image, objects=found)
    if not objects.are_in(found.present, objects.CLASS):
        raise UsageError(
            f"{table.request.name} has boxes in {found.name} without a class; give each a category."
        )
    return TableColumns.of("detection", image=image, objects=found)
