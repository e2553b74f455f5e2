"""The columns of a table that a task uses: given, or detected."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from razorctl import units
from razorctl.config.tasks import LANGUAGE, OF_ROWS, Task
from razorctl.data.own.raw import TEXT_COLUMNS
from razorctl.data.own.read import tagged
from razorctl.data.own.read.sample import Sample, normalized_name
from razorctl.data.own.read.table_columns import FLAG, ROLES, TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError
from razorctl.models import Modality

LABELS = frozenset({"label", "labels", "class", "target", "category"})
SCORES = frozenset({"score", "rating", "similarity", "similarity_score", "stars"})
MASKS = frozenset(
    {"mask", "masks", "annotation", "annotations", "segmentation", "label", "labels", "seg_map"}
    | {f"{what}_{of}" for what in ("mask", "annotation") for of in ("path", "file", "name")}
    | {"segmentation_mask", "semantic_mask", "label_image"}
)
TOKENS = ("tokens", "words", "token", "word")
TAGS = ("tags", "tag", "labels", "label")  # ends of names
TEXTS = frozenset({"text", "sentence", "review"})
PAIRS = (
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)


def classifier_columns(request: DataRequest, sample: Sample) -> TableColumns:
    """The columns of a table that a classifier uses, or a regression, by the values of the label.

    Raises UsageError, which lists the columns, for a given column that is not there, and if it is
    not clear which one to use.
    """
    image = _given(request, sample, request.image_column, "image")
    texts = _given_texts(request, sample)
    given = _given_labels(request, sample)
    taken = {column for column in (image, *given, *texts) if column is not None}
    if image is None and not texts:
        image = _image(request, sample, taken)
        texts = _texts(request, sample, taken, image)
        if image is not None and texts:
            raise UsageError(
                f"{request.name} has images in column {image} and text in {' and '.join(texts)}, "
                f"of {_listed(sample)}; choose with --image-column or --text-column."
            )
    if image is None and not texts:
        raise UsageError(
            f"none of the columns of {request.name} is clearly an image or a text: "
            f"{_listed(sample)}; name one with --image-column or --text-column."
        )
    inputs = [column for column in (image, *texts) if column is not None]
    labels = given or _labels(request, sample, inputs)
    if twice := {*inputs} & {*labels}:
        raise UsageError(
            f"column {min(twice)} of {request.name} cannot be used twice; name others of "
            f"{_listed(sample)}."
        )
    task = _task_of(request, sample, labels)
    roles: dict[str, str | None] = {ROLES[task]: labels[0]}
    if len(labels) > 1:
        roles = {f"{FLAG}{number}": column for number, column in enumerate(labels)}
    return TableColumns.of(task, image=image, **_text_roles(texts), **roles)


def refuse_misread(request: DataRequest, sample: Sample, found: TableColumns) -> None:
    """Raises UsageError for a header in the first row, and for labels of as many words as texts."""
    label, text = found.get("label"), found.get("text")
    if text and normalized_name(str(*sample.values[text][:1])) in LABELS | TEXTS:
        raise UsageError(f"row 1 of {request.name} looks like its header; delete what is above it.")
    used = [column for column in (label, text) if column is not None and request.task is None]
    words = [[len(str(value).split()) for value in sample.values[column]] for column in used]
    tags = words[0] if len(words) == 2 and words[0] == words[1] else []
    if len({*tags}) > 1 and 2 * tags.count(1) < len(tags):
        raise UsageError(
            f"{request.name} has tags of words in {label}; write lists, or give --task "
            "classification."
        )


def number_notes(request: DataRequest, sample: Sample, found: TableColumns) -> tuple[str, ...]:
    """A note on numbers that are taken as classes, unless they only number these: 0, 1, 2."""
    label = found.get("label")
    if label is None or request.task is not None or "regression" not in request.tasks:
        return ()
    numbers = sample.numbers(label)
    count = len({*numbers})
    numbered = normalized_name(label) in LABELS and {*numbers} == {*range(count)}
    if count < 3 or numbered or label in sample.classes:
        return ()
    return (
        f"whole numbers in {label} are learned as {units.count(count, 'class')}; --task "
        "regression learns them as numbers.",
    )


def _task_of(request: DataRequest, sample: Sample, labels: Sequence[str]) -> Task:
    """The task with labels for each row that is given, or that their values say.

    Raises UsageError for several columns of labels if that is not multi-label.
    """
    several = len(labels) > 1
    if request.task == "multi-label" and not several and not sample.has_lists(labels[0]):
        raise UsageError(
            f"column {labels[0]} of {request.name} has no lists of labels; name a column that has, "
            'such as ["a", "b"], or a column of 0 and 1 for each label with --label-column a,b.'
        )
    if "multi-label" in request.tasks and (
        several or (not request.task and sample.has_lists(labels[0]))
    ):
        return "multi-label"
    if several:
        raise UsageError(
            f"{request.name} has one column of labels for {request.tasks[0]}, not "
            f"{', '.join(labels)}; name one with --label-column."
        )
    if not request.task and (
        ("regression" in request.tasks and sample.has_decimals(labels[0]))
        or _may_be_score(request, sample, labels[0])
    ):
        return "regression"
    return next((task for task in request.tasks if task in OF_ROWS), "classification")


def _may_be_score(request: DataRequest, sample: Sample, column: str) -> bool:
    """Whether a column is called a score and has too many numbers for classes."""
    called = "regression" in request.tasks and normalized_name(column) in SCORES
    return called and bool(sample.numbers(column)) and not sample.has_few_values(column)


def _given_labels(request: DataRequest, sample: Sample) -> tuple[str, ...]:
    """The columns that `Job.label_column` names, `a,b` for several."""
    if request.label_column is None:
        return ()
    parts = _parts(sample, request.label_column)
    for part in parts:
        _given(request, sample, part, "label")
    return tuple(dict.fromkeys(parts))


def single_text(request: DataRequest, sample: Sample) -> str | None:
    """The column of texts that are used alone; None if there is none, or only pairs of texts.

    One called text is preferred. Raises UsageError for a given column that is not there, and if
    several may be it.
    """
    texts = _given_texts(request, sample)
    if not texts:
        called_text = [c for c in sample.values if normalized_name(c) == "text" and sample.texts(c)]
        one = len(called_text) == 1
        texts = tuple(called_text) if one else _texts(request, sample, set(), None)
    return texts[0] if len(texts) == 1 else None


def tokens_and_tags(request: DataRequest, sample: Sample) -> tuple[str | None, str | None]:
    """The columns of lists of tokens and of their tags, given or by their names; None if not clear.

    Of several columns of tags, those of named entities. Raises what `classifier_columns` raises.
    """
    tokens = _tokens(request, sample)
    tags = _given(request, sample, request.label_column, "label") if tokens else None
    if tokens is None or tags is not None:
        return tokens, tags if tags is None or sample.has_lists(tags) else None
    if numbered := sample.numbered:
        found = tagged.tag_columns(numbered)
        return tokens, _only(request, sample, found, "tag", "label-column", tagged.seen(numbered))
    lists = [c for c in sample.values if c != tokens and sample.has_lists(c)]
    called = [c for c in lists if normalized_name(c).endswith(TAGS)]
    entities = [c for c in called if normalized_name(c).startswith("ner")]
    return tokens, _only(request, sample, entities or called, "tag", "label-column")


def _tokens(request: DataRequest, sample: Sample) -> str | None:
    """The column of lists of tokens; None if there is none, or another one of texts is given."""
    if request.text_column is not None:
        given = _given_texts(request, sample)
        return given[0] if len(given) == 1 and sample.has_lists(given[0], str) else None
    if numbered := sample.numbered:
        label = request.label_column
        return tagged.token_column(numbered, [label] if label else tagged.tag_columns(numbered))
    lists = [column for column in sample.values if sample.has_lists(column, str)]
    named = [c for name in TOKENS for c in lists if normalized_name(c) == name]
    return named[0] if named else None


def image_and_mask(request: DataRequest, sample: Sample) -> tuple[str | None, str | None]:
    """The columns of images and of their masks, which `Job.label_column` names; None if not clear.

    Raises what `classifier_columns` raises.
    """
    image = _given(request, sample, request.image_column, "image")
    given = _given_labels(request, sample)
    if len(given) > 1:
        return image, None
    mask = given[0] if given else None
    if mask is None:
        candidates = [
            column
            for column in sample.values
            if column != image
            and normalized_name(column) in MASKS
            and sample.has_images(column, MASKS)
        ]
        mask = _only(request, sample, candidates, "mask", "label-column")
    elif not sample.has_images(mask, {normalized_name(mask)}):
        mask = None
    if image is None and mask is not None:
        image = _image(request, sample, {mask})
    return image, mask


def label_candidates(
    request: DataRequest, sample: Sample, inputs: Sequence[str], *, by_name: bool = False
) -> Sequence[str]:
    """The columns that may be the label; more than one is not clear.

    Args:
        request: what is asked of the data.
        sample: the first rows.
        inputs: the columns that are no labels.
        by_name: whether only columns count whose name or type says so, not those of few values.
    """
    if request.label_column is not None:
        return [request.label_column]

    free = [c for c in sample.values if c not in inputs and c not in sample.images]
    scores = [c for c in free if "regression" in request.tasks and sample.has_decimals(c)]
    lists = [c for c in free if "multi-label" in request.tasks and sample.has_lists(c, str)]
    signs: tuple[Callable[[str], bool], ...] = (
        lambda column: normalized_name(column) in LABELS,
        lambda column: column in sample.classes,
        lambda column: column in scores and normalized_name(column) in SCORES,
        lambda column: not by_name and column in lists,
        lambda column: not by_name and sample.has_few_values(column),
        lambda column: not by_name and sample.has_few_values(column, len(sample.values[column])),
        lambda column: (
            not by_name and (_may_be_score(request, sample, column) or [column] == scores == free)
        ),
    )
    candidates = ([column for column in free if sign(column)] for sign in signs)
    return next(filter(None, candidates), [])


def as_trained(request: DataRequest, sample: Sample) -> DataRequest:
    """The question with the columns that the run was trained on, if the table has them.

    Columns that are given stay; if one of images or of texts is, neither is taken from the run.
    """
    trained = request.trained
    if trained is None:
        return request
    label = request.label_column
    own = trained.label_column
    if label is None and own is not None and {*_parts(sample, own)} <= sample.values.keys():
        label = own
    if request.image_column is not None or request.text_column is not None:
        return replace(request, label_column=label)
    image, text = trained.image_column, trained.text_column
    has_text = text is not None and {*_parts(sample, text)} <= sample.values.keys()
    return replace(
        request,
        image_column=image if image in sample.values else None,
        text_column=text if has_text else None,
        label_column=label,
    )


def unlabeled_columns(request: DataRequest, sample: Sample, modality: Modality) -> TableColumns:
    """The columns of a table whose labels are not read; raises what `classifier_columns` raises.

    modality: what the model takes. A language model takes one text.
    """
    image = _given(request, sample, request.image_column, "image")
    texts = _given_texts(request, sample)
    taken = set() if request.label_column is None else {*_parts(sample, request.label_column)}
    if modality == "image":
        if image is None and request.task == "segmentation":
            image, mask = image_and_mask(request, sample)
            image = None if mask is None else image
        image = image or _image(request, sample, taken)
    elif request.task == "token-classification" and (tokens := _tokens(request, sample)):
        return TableColumns.of(tokens=tokens)
    elif request.task in LANGUAGE:
        text = single_text(request, sample)
        texts = () if text is None else (text,)
    else:
        texts = texts or _texts(request, sample, taken, None)
    if image is None and not texts:
        raise UsageError(
            f"none of the columns of {request.name} clearly holds {modality}s: {_listed(sample)}"
            f"; name one with --{modality}-column."
        )
    return TableColumns.of(image=image, **_text_roles(texts))


def _text_roles(texts: Iterable[str]) -> dict[str, str]:
    return dict(zip(TEXT_COLUMNS, texts, strict=False))


def _listed(sample: Sample) -> str:
    return ", ".join(map(str, sample.values))


def _given(request: DataRequest, sample: Sample, column: str | None, what: str) -> str | None:
    if column is not None and column not in sample.values:
        raise UsageError(
            f"{request.name} has no column {column}, only {_listed(sample)}; name one of them with "
            f"--{what}-column."
        )
    return column


def _given_texts(request: DataRequest, sample: Sample) -> tuple[str, ...]:
    text = request.text_column
    if text is None:
        return ()
    parts = _parts(sample, text)
    if len(parts) > 2 or len(set(parts)) < len(parts):
        raise UsageError(f"text column {text!r} does not name one or two columns; give a or a,b.")
    for part in parts:
        _given(request, sample, part, "text")
    return tuple(parts)


def _parts(sample: Sample, text: str) -> list[str]:
    # The name of a column may have a comma in it.
    return [text] if text in sample.values else [part.strip() for part in text.split(",")]


def _only(
    request: DataRequest,
    sample: Sample,
    candidates: Sequence[str],
    role: str,
    option: str,
    of: str = "",
) -> str | None:
    """The only candidate; None without any. Raises UsageError for several of all, in words `of`."""
    if len(candidates) > 1:
        raise UsageError(
            f"{request.name} has several columns that may be the {role}, {', '.join(candidates)}, "
            f"of {of or _listed(sample)}; choose with --{option}."
        )
    return candidates[0] if candidates else None


def _image(request: DataRequest, sample: Sample, taken: Collection[str]) -> str | None:
    candidates = sample.image_columns(taken)
    called_image = [column for column in candidates if normalized_name(column) == "image"]
    return _only(request, sample, called_image or candidates, "image", "image-column")


def _texts(
    request: DataRequest, sample: Sample, taken: set[str], image: str | None
) -> tuple[str, ...]:
    def is_prose(column: str) -> bool:
        values = sample.texts(column)
        return bool(values) and 2 * sum(" " in value.strip() for value in values) >= len(values)

    taken = taken | sample.images | sample.classes | {image or ""}
    free = {normalized_name(c): c for c in sample.values if c not in taken and sample.texts(c)}
    pairs = [tuple(free[part] for part in pair) for pair in PAIRS if free.keys() >= set(pair)]
    singles = [free[name] for name in free if name in TEXTS]
    if len(pairs) == 1 and set(singles) <= set(pairs[0]):
        return pairs[0]
    candidates = [column for pair in pairs for column in pair] + singles
    if not candidates and image is None:
        labels = [column for name, column in free.items() if name in LABELS]
        candidates = [c for c in free.values() if c not in labels and is_prose(c)]
    text = _only(request, sample, list(dict.fromkeys(candidates)), "text", "text-column")
    return () if text is None else (text,)


def _labels(request: DataRequest, sample: Sample, inputs: Sequence[str]) -> Sequence[str]:
    """The columns of labels: one, or for multi-label those of 0 and 1, unless there are lists."""
    candidates = label_candidates(request, sample, inputs)
    free = [c for c in sample.values if c not in inputs and c not in sample.images]
    flags = [column for column in free if sample.has_flags(column)]
    if request.task == "multi-label" and not any(map(sample.has_lists, candidates)):
        if len(flags) > 1:
            return flags
        raise UsageError(
            f"{request.name} has no lists of labels, and no columns of 0 and 1 for each: "
            f"{_listed(sample)}; name some with --label-column a,b."
        )
    if len(candidates) > 1 and {*candidates} <= {*flags} and "multi-label" in request.tasks:
        raise UsageError(
            f"{request.name} has several columns that may be the label, {', '.join(candidates)}, "
            f"of {_listed(sample)}; choose with --label-column, or take all with --task "
            "multi-label."
        )
    label = _only(request, sample, candidates, "label", "label-column")
    if label is None:
        raise UsageError(
            f"none of the columns of {request.name} is clearly the label: {_listed(sample)}; name "
            "one with --label-column."
        )
    return [label]
