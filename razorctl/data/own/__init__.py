"""Data sets of a user: files, folders, and sets of the hub that are not registered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.tasks import ENTITY_TAG, LANGUAGE, Task
from razorctl.data.own import boxes, read
from razorctl.data.own.held_out import held_out_count
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read import hub
from razorctl.data.own.read.table_columns import IMAGE_TEXT, TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.data.own.splitting import SplitRows, check_rows
from razorctl.data.source import Source, Splits
from razorctl.models import Progress


def find(job: Job, trained: Job | None = None, classes: Sequence[str] = ()) -> Source:
    """The data set that a job names by a path or by `hf:`, read as far as planning needs it.

    A set of the hub whose card is complete is fetched only when it is loaded. Raises UsageError if
    there is no such set or it is not clear how to use it, DataError if it cannot be used, and
    MissingError if it is not on the hub.

    trained, classes: as in `DataRequest`; trained is the job of the run.
    """
    request = DataRequest.of(job, trained, classes=tuple(classes))
    card = hub.card(request) if read.on_hub(request) and trained is None else None
    return (
        _of_rows(check_rows(request, read.raw(request)))
        if card is None
        else _of_card(request, card)
    )


def _of_rows(rows: SplitRows) -> Source:
    name, raw = rows.request.name, rows.raw
    columns = raw.splits["train"].column_names
    return _described(name, raw, raw.details, rows.classes, rows.counts(), columns, rows.load)


def _of_card(request: DataRequest, card: hub.DatasetCard) -> Source:
    """The data set by the hub's card; faults of its rows show when it is loaded."""
    counts = {**card.counts}
    counts["held out"] = held_out_count(counts["train"], request.share(counts))
    left = counts["train"] - counts["held out"]
    counts["train"] = min(left, request.max_rows or left)

    def load(progress: Progress = lambda _: None) -> Splits:
        return check_rows(request, hub.hub_rows(request)).load(progress)

    name, columns = request.name, card.columns
    details = columns.details(", as its card says")
    return _described(name, columns, details, card.classes, counts, columns.fields, load)


def _described(
    name: str,
    data: RawRows | TableColumns,
    details: str,
    classes: Sequence[str],
    counts: Mapping[str, int],
    columns: Sequence[str],
    load: Callable[..., Splits],
) -> Source:
    """The description of a data set. counts: split -> rows. columns: their names in `RawRows`."""
    task = data.task
    held_out, validation, test = map(counts.get, ("held out", "validation", "test"))
    parts = [f"{units.count(counts['train'], 'row')} to train on"]
    parts += [f"{held_out:,} held out for validation"] if held_out else []
    splits = (split for split in ("validation", "test") if split in counts)
    parts += [f"{counts[split]:,} for {split}" for split in splits]
    source = Source(
        name=name,
        summary=details,
        modality=data.modality,
        classes=len(classes),
        train_examples=counts["train"],
        test_examples=(validation if test is None else test) or held_out,
        load=load,
        details=(f"{name}: {details}", _learned(data, classes), ", ".join(parts)),
        metric=_metric(task, classes),
        task=task,
        validated=validation is not None or bool(held_out),
        evaluated_examples=validation or held_out or test,
        conversations="messages" in columns,
    )
    if task not in LANGUAGE or "text" not in columns:
        return source
    # Examples are blocks of tokens, not texts.
    return replace(source, train_examples=None, test_examples=None, evaluated_examples=None)


def _metric(task: Task, classes: Sequence[str]) -> str | None:
    """The figure of data that their task's usual one does not suit; None for others.

    Tags may be per token, such as parts of speech, and not of entities (B-, I-). An embedding with
    one class learns scores.
    """
    if task == "token-classification" and not any(map(ENTITY_TAG.fullmatch, classes)):
        return "accuracy"
    return "spearman" if task == "embedding" and len(classes) == 1 else None


def _learned(data: RawRows | TableColumns, classes: Sequence[str]) -> str:
    """What is learned, for a sentence: the task, or its classes."""
    task = data.task
    few = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    if task == "regression":
        return f"for regression: {few}"
    if task == "embedding" and tuple(classes) == IMAGE_TEXT:
        return "for embeddings of images and texts"
    if task == "embedding":
        pairs = "pairs with scores" if len(classes) == 1 else "similar texts"
        return f"for embeddings of texts, from {pairs}: {few}"
    if task == "token-classification":
        return f"for {units.count(len(classes), 'tag')} of tokens: {few}"
    if isinstance(data, RawRows) and task == "detection":
        boxed = units.count(boxes.total(data), "box")
        return f"{units.count(len(classes), 'class')} of objects in {boxed}: {few}"
    if task == "multi-label":
        return f"multi-label, {units.count(len(classes), 'label')}: {few}"
    return f"{units.count(len(classes), 'class')}: {few}" if classes else f"for {task}"
