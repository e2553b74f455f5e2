"""Recognizes the columns of images and their captions, of which embeddings are learned."""

from razorctl.data.own.read import refused
from razorctl.data.own.read.column import Column, Columns
from razorctl.data.own.read.table import Table
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError
from razorctl.models import Modality

SURE = ("caption", "captions")  # names of columns that no other task has
NAMES = (*SURE, "text", "description", "sentence", "sentences", "alt_text", "title")


def columns_of(table: Table) -> TableColumns | None:
    """The columns of images and of their captions; None for other tasks and models.

    Without --task, the captions must have a name of SURE. Raises UsageError if columns are not
    clear, and for columns that may be captions.
    """
    request, options = table.request, table.text_options
    if request.embeds != "image":
        return None
    text = options[0] if options else table.first(NAMES)
    if request.task is None:
        if request.columns or not text or not (image := table.image([text])):
            return None
        if table.may_have_label((image, text)):
            return None
        if text.key not in SURE:
            raise UsageError(
                f"{request.name} has images in {image.name}, and {text.name} may be their captions "
                f"or their classes; give --task embedding, or {refused.CLASSES}."
            )
    if len(options) > 1 or request.label_column is not None:
        raise UsageError(
            f"{request.model} embeds an image and a text in each row; name one column with "
            "--text-column, and leave --label-column out."
        )
    image = table.image_option or table.image([text] if text else [])
    if image is None:
        raise UsageError(
            f"{request.name} has no column of images, which {request.model} embeds with texts, "
            f"only {table.listed}; name one with --image-column, or choose a model of texts."
        )
    text = text or _prose(table, image)
    if text.has_lists():
        raise UsageError(
            f"column {text.name} of {request.name} has lists of captions; write a row for each."
        )
    return TableColumns.of("embedding", image=image, text=text)


def modality_of(request: DataRequest, columns: Columns) -> Modality:
    """Whether a table has images or texts to embed; raises UsageError for one with both."""
    if request.text_column or request.image_column:
        return "image" if request.image_column else "text"
    table = Table.for_run(request, columns)
    if table.images and (text := table.first(NAMES)):
        raise UsageError(
            f"{request.name} has images in {table.images[0].name} and texts in {text.name}; choose "
            "with --image-column or --text-column."
        )
    return "image" if table.images else "text"


def _prose(table: Table, image: Column) -> Column:
    """The only column of texts of several words; raises UsageError if there is none."""
    free = [c for c in table.columns.values() if c is not image and not c.holds and c.is_prose]
    text = table.only(free, "caption", "text-column")
    if text is None:
        raise UsageError(
            f"{table.request.name} has images in {image.name}, and none of its other columns is "
            f"clearly their captions: {table.listed}; name one with --text-column."
        )
    return text
