"""Data sets of one's own: what a name that is not registered stands for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.tasks import ENTITY_TAG, LANGUAGE, Task
from razorctl.data.own import read
from razorctl.data.own.read import hub
from razorctl.data.own.request import DataRequest
from razorctl.data.own.splitting import SplitRows, check_rows, held_out_count
from razorctl.data.source import Source, Splits
from razorctl.models import Modality, Progress


def find(job: Job, trained: Job | None = None, classes: Sequence[str] = ()) -> Source:
    """The data set that a job names by a path or by `hf:`, read as far as planning needs it.

    If the card of a set of the hub says enough, no data are fetched before they are loaded.
    Raises UsageError if there is none or it is not clear how to use it, DataError if it cannot be
    used, and MissingError if it is not on the hub.

    trained: the job of a finished run, whose columns are used where tables have them.
    classes: the class names of that run, which are classes even if they look like no label.
    """
    request = DataRequest.of(job, trained, classes=tuple(classes))
    card = hub.card(request) if read.on_hub(request) and trained is None else None
    return (
        _of_rows(check_rows(request, read.raw(request)))
        if card is None
        else _of_card(request, card)
    )


def _of_rows(rows: SplitRows) -> Source:
    request, raw = rows.request, rows.raw
    counts = rows.counts()
    source = _described(
        request, raw.modality, raw.details, rows.classes, counts, rows.load, raw.task
    )
    if "messages" in raw.splits["train"].column_names:
        return replace(source, conversations=True)
    return _of_blocks(source) if "text" in raw.splits["train"].column_names else source


def _of_card(request: DataRequest, card: hub.DatasetCard) -> Source:
    """The data set as the hub's card has it; what is wrong with its rows is found by loading it."""
    counts = {**card.counts}
    counts["held out"] = held_out_count(counts["train"], request.share(counts))
    counts["train"] -= counts["held out"]

    def load(progress: Progress = lambda _: None) -> Splits:
        return check_rows(request, hub.raw(request)).load(progress)

    columns = card.columns
    details = columns.details(", as its card says")
    source = _described(
        request, columns.modality, details, card.classes, counts, load, columns.task
    )
    if "messages" in columns.fields:
        return replace(source, conversations=True)
    return _of_blocks(source) if columns.get("text") else source


def _described(
    request: DataRequest,
    modality: Modality,
    details: str,
    classes: Sequence[str],
    counts: Mapping[str, int],
    load: Callable[..., Splits],
    task: Task = "classification",
) -> Source:
    evaluated = "test" if "test" in counts else "validation"
    return Source(
        name=request.name,
        summary=details,
        modality=modality,
        classes=len(classes),
        train_examples=counts["train"],
        test_examples=counts.get(evaluated) or counts.get("held out"),
        load=load,
        details=_details(request.name, details, task, classes, counts),
        metric="accuracy" if _names_no_entities(task, classes) else None,
        task=task,
        validated="validation" in counts or bool(counts.get("held out")),
        evaluated_examples=counts.get("validation") or counts.get("held out") or counts.get("test"),
    )


def _of_blocks(source: Source) -> Source:
    """The data set without numbers of examples if these are blocks of tokens, not its texts."""
    if source.task not in LANGUAGE:
        return source
    return replace(source, train_examples=None, test_examples=None, evaluated_examples=None)


def _details(
    name: str,
    details: str,
    task: Task,
    classes: Sequence[str],
    counts: Mapping[str, int],
) -> tuple[str, ...]:
    """Lines on what was detected."""
    parts = [f"{units.count(counts['train'], 'row')} to train on"]
    if counts.get("held out"):
        parts.append(f"{counts['held out']:,} held out for validation")
    parts += [
        f"{counts[split]:,} for {split}" for split in ("validation", "test") if split in counts
    ]
    return (
        f"{name}: {details}",
        _learned(task, classes),
        ", ".join(parts),
    )


def _names_no_entities(task: Task, classes: Sequence[str]) -> bool:
    """Whether these are tags of tokens alone, as parts of speech, which have no entities."""
    return task == "token-classification" and not any(map(ENTITY_TAG.fullmatch, classes))


def _learned(task: Task, classes: Sequence[str]) -> str:
    """The task, or the classes where there are several."""
    few = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    if task == "regression":
        return f"for regression: {few}"
    if task == "token-classification":
        return f"for {units.count(len(classes), 'tag')} of tokens: {few}"
    if task == "multi-label":
        return f"for {units.count(len(classes), 'label')} of a row each: {few}"
    return f"{units.count(len(classes), 'class')}: {few}" if classes else f"for {task}"
