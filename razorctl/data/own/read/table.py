"""The first rows of a table with the request for it: the columns that may have each role."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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


def parts_of(names: str, columns: Collection[str]) -> list[str]:
    """The columns that an option names, `a,b` for several; a column may have a comma in its name.

    columns: the columns that are there.
    """
    return [names] if names in columns else [part.strip() for part in names.split(",")]


@dataclass(frozen=True)
class Table:
    """The first rows of a table, and the request for it.

    Methods raise UsageError, which lists the columns, if an option names a column that is not there
    and if several columns may have one role.
    """

    request: DataRequest
    sample: Sample

    @classmethod
    def for_run(cls, request: DataRequest, sample: Sample) -> "Table":
        """The table with the columns that a finished run was trained on, as far as it has them.

        Columns of options stay. If one of images or of texts is, neither is taken from the run.
        """
        trained, columns = request.trained, sample.values.keys()
        if trained is None:
            return cls(request, sample)

        def there(names: str | None) -> str | None:
            return names if names is not None and {*parts_of(names, columns)} <= columns else None

        if request.label_column is None:
            request = replace(request, label_column=there(trained.label_column))
        if request.image_column is None and request.text_column is None:
            image = trained.image_column if trained.image_column in columns else None
            request = replace(request, image_column=image, text_column=there(trained.text_column))
        return cls(request, sample)

    @cached_property
    def names(self) -> dict[str, str]:
        """The normalized name of each column -> the column."""
        return {normalized_name(column): column for column in self.sample.values}

    @property
    def listed(self) -> str:
        """The columns, for a sentence."""
        return ", ".join(map(str, self.sample.values))

    @cached_property
    def images(self) -> list[str]:
        """The columns of images."""
        return self.sample.image_columns()

    @property
    def clear(self) -> bool:
        """Whether columns are called a text and its label, or an image and its label."""
        return bool(self.names.keys() & LABELS) and bool(self.names.keys() & TEXTS)

    def first(self, names: Iterable[str]) -> str | None:
        """The first of these normalized names that a column has, as the column."""
        return next((self.names[name] for name in names if name in self.names), None)

    def free(self, inputs: Collection[str]) -> list[str]:
        """The columns beside the inputs and typed images, which may be labels."""
        taken = {*inputs} | self.sample.images
        return [column for column in self.sample.values if column not in taken]

    def may_have_label(self, inputs: Sequence[str]) -> bool:
        """Whether a column beside the inputs may be the label of a classifier."""
        unclear = any(len(self.sample.values[column]) < 2 for column in self.free(inputs))
        return unclear or bool(self.label_candidates(inputs))

    def _checked(self, column: str, option: str) -> str:
        if column not in self.sample.values:
            raise UsageError(
                f"{self.request.name} has no column {column}, only {self.listed}; name one of them "
                f"with --{option}-column."
            )
        return column

    def _only(self, columns: Sequence[str], role: str, option: str, of: str = "") -> str | None:
        """The only column that may have a role, or None. of: all columns, for the error."""
        if len(columns) > 1:
            raise UsageError(
                f"{self.request.name} has several columns that may be the {role}, "
                f"{', '.join(columns)}, of {of or self.listed}; choose with --{option}."
            )
        return columns[0] if columns else None

    @property
    def image_option(self) -> str | None:
        """The column that --image-column names."""
        column = self.request.image_column
        return None if column is None else self._checked(column, "image")

    @property
    def text_options(self) -> tuple[str, ...]:
        """The one or two columns that --text-column names."""
        names = self.request.text_column
        parts = [] if names is None else parts_of(names, self.sample.values)
        if len(parts) > 2 or len(set(parts)) < len(parts):
            raise UsageError(
                f"text column {names!r} does not name one or two columns; give a or a,b."
            )
        return tuple(self._checked(part, "text") for part in parts)

    @property
    def label_options(self) -> tuple[str, ...]:
        """The columns that --label-column names."""
        names = self.request.label_column
        parts = [] if names is None else parts_of(names, self.sample.values)
        return tuple(dict.fromkeys(self._checked(part, "label") for part in parts))

    def _image(self, taken: Collection[str]) -> str | None:
        candidates = self.sample.image_columns(taken)
        called_image = [column for column in candidates if normalized_name(column) == "image"]
        return self._only(called_image or candidates, "image", "image-column")

    def _texts(self, taken: Collection[str] = (), image: str | None = None) -> tuple[str, ...]:
        """The column of texts, or the two of a pair, by their names or as the only prose."""
        sample = self.sample

        def is_prose(column: str) -> bool:
            values = sample.texts(column)
            return bool(values) and 2 * sum(" " in value.strip() for value in values) >= len(values)

        taken = {*taken, image or ""} | sample.images | sample.classes
        free = {normalized_name(c): c for c in sample.values if c not in taken and sample.texts(c)}
        pairs = [tuple(free[part] for part in pair) for pair in PAIRS if free.keys() >= set(pair)]
        singles = [free[name] for name in free if name in TEXTS]
        if len(pairs) == 1 and set(singles) <= set(pairs[0]):
            return pairs[0]
        candidates = [column for pair in pairs for column in pair] + singles
        if not candidates and image is None:
            labels = [column for name, column in free.items() if name in LABELS]
            candidates = [c for c in free.values() if c not in labels and is_prose(c)]
        text = self._only(list(dict.fromkeys(candidates)), "text", "text-column")
        return () if text is None else (text,)

    def single_text(self) -> str | None:
        """The column of texts that are used alone; None if there is none, or only pairs of texts.

        A column called text is preferred.
        """
        texts = self.text_options
        if not texts:
            sample = self.sample
            called = [c for c in sample.values if normalized_name(c) == "text" and sample.texts(c)]
            texts = tuple(called) if len(called) == 1 else self._texts()
        return texts[0] if len(texts) == 1 else None

    def tokens(self) -> str | None:
        """The column of lists of tokens; None if there is none, or options name other texts."""
        sample = self.sample
        if self.request.text_column is not None:
            texts = self.text_options
            return texts[0] if len(texts) == 1 and sample.has_lists(texts[0], str) else None
        if numbered := sample.numbered:
            label = self.request.label_column
            return tagged.token_column(numbered, [label] if label else tagged.tag_columns(numbered))
        lists = [column for column in sample.values if sample.has_lists(column, str)]
        called = [c for name in TOKENS for c in lists if normalized_name(c) == name]
        return called[0] if called else None

    def tokens_and_tags(self) -> tuple[str | None, str | None]:
        """The columns of lists of tokens and of their tags; None if not clear.

        Of several columns of tags, a column of named entities counts.
        """
        sample, tokens, label = self.sample, self.tokens(), self.request.label_column
        if tokens is None:
            return None, None
        if label is not None:
            tags = self._checked(label, "label")
            return tokens, tags if sample.has_lists(tags) else None
        if numbered := sample.numbered:
            columns, listed = tagged.tag_columns(numbered), tagged.seen(numbered)
            return tokens, self._only(columns, "tag", "label-column", listed)
        lists = [c for c in sample.values if c != tokens and sample.has_lists(c)]
        called = [c for c in lists if normalized_name(c).endswith(TAGS)]
        entities = [c for c in called if normalized_name(c).startswith("ner")]
        return tokens, self._only(entities or called, "tag", "label-column")

    def image_and_mask(self) -> tuple[str | None, str | None]:
        """The columns of images and of masks, which --label-column names; None if not clear."""
        sample, image, labels = self.sample, self.image_option, self.label_options
        if len(labels) > 1:
            return image, None
        if labels:
            mask = labels[0] if sample.has_images(labels[0], {normalized_name(labels[0])}) else None
        else:
            called = [c for c in sample.values if c != image and normalized_name(c) in MASKS]
            masks = [column for column in called if sample.has_images(column, MASKS)]
            mask = self._only(masks, "mask", "label-column")
        if image is None and mask is not None:
            image = self._image({mask})
        return image, mask

    def label_candidates(self, inputs: Sequence[str], *, by_name: bool = False) -> Sequence[str]:
        """The columns that may be the label; more than one is not clear.

        inputs: the columns that are no labels. by_name: whether only columns count whose name or
        type says so, not columns of few values.
        """
        if self.request.label_column is not None:
            return [self.request.label_column]
        sample, tasks, free = self.sample, self.request.tasks, self.free(inputs)
        scores = [c for c in free if "regression" in tasks and sample.has_decimals(c)]
        sole_score = scores if scores == free else []
        by_names: tuple[Callable[[str], bool], ...] = (
            lambda column: normalized_name(column) in LABELS,
            lambda column: column in sample.classes,
            lambda column: column in scores and normalized_name(column) in SCORES,
        )
        by_values: tuple[Callable[[str], bool], ...] = (
            lambda column: "multi-label" in tasks and sample.has_lists(column, str),
            lambda column: sample.has_few_values(column),
            lambda column: sample.has_few_values(column, len(sample.values[column])),
            lambda column: self._may_be_score(column) or [column] == sole_score,
        )
        signs = by_names if by_name else by_names + by_values
        return next(filter(None, ([c for c in free if sign(c)] for sign in signs)), [])

    def _may_be_score(self, column: str) -> bool:
        """Whether a column is called a score and has too many numbers for classes."""
        called = "regression" in self.request.tasks and normalized_name(column) in SCORES
        return (
            called and bool(self.sample.numbers(column)) and not self.sample.has_few_values(column)
        )

    def classifier_columns(self) -> TableColumns:
        """The columns that a classifier uses, or a regression, by the values of the label.

        Raises UsageError also if it is not clear which columns to use.
        """
        name, image, texts = self.request.name, self.image_option, self.text_options
        labels = self.label_options
        if image is None and not texts:
            image = self._image(labels)
            texts = self._texts(labels, image)
            if image is not None and texts:
                raise UsageError(
                    f"{name} has images in column {image} and text in {' and '.join(texts)}, of "
                    f"{self.listed}; choose with --image-column or --text-column."
                )
        inputs = [column for column in (image, *texts) if column is not None]
        if not inputs:
            raise UsageError(
                f"none of the columns of {name} is clearly an image or a text: {self.listed}; "
                "name one with --image-column or --text-column."
            )
        labels = labels or self._labels(inputs)
        if twice := {*inputs} & {*labels}:
            raise UsageError(
                f"column {min(twice)} of {name} cannot be used twice; name others of {self.listed}."
            )
        task = self._task_of(labels)
        roles: dict[str, str | None] = {ROLES[task]: labels[0]}
        if len(labels) > 1:
            roles = {f"{FLAG}{number}": column for number, column in enumerate(labels)}
        return TableColumns.of(task, image=image, **_text_roles(texts), **roles)

    def _labels(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """The column of labels, or for multi-label without lists the columns of 0 and 1."""
        name, candidates = self.request.name, self.label_candidates(inputs)
        flags = [column for column in self.free(inputs) if self.sample.has_flags(column)]
        if self.request.task == "multi-label" and not any(map(self.sample.has_lists, candidates)):
            if len(flags) > 1:
                return tuple(flags)
            raise UsageError(
                f"{name} has no lists of labels, and no columns of 0 and 1 for each: "
                f"{self.listed}; name some with --label-column a,b."
            )
        several = len(candidates) > 1 and {*candidates} <= {*flags}
        if several and "multi-label" in self.request.tasks:
            raise UsageError(
                f"{name} has several columns that may be the label, {', '.join(candidates)}, of "
                f"{self.listed}; choose with --label-column, or take all with --task multi-label."
            )
        label = self._only(candidates, "label", "label-column")
        if label is None:
            raise UsageError(
                f"none of the columns of {name} is clearly the label: {self.listed}; name one with "
                "--label-column."
            )
        return (label,)

    def _task_of(self, labels: Sequence[str]) -> Task:
        """The task with labels for each row that is asked for, or that their values say."""
        request, sample, several = self.request, self.sample, len(labels) > 1
        tasks, lists = request.tasks, sample.has_lists(labels[0])
        if request.task == "multi-label" and not several and not lists:
            raise UsageError(
                f"column {labels[0]} of {request.name} has no lists of labels; name a column that "
                'has, such as ["a", "b"], or a column of 0 and 1 for each label with '
                "--label-column a,b."
            )
        if "multi-label" in tasks and (several or (not request.task and lists)):
            return "multi-label"
        if several:
            raise UsageError(
                f"{request.name} has one column of labels for {tasks[0]}, not "
                f"{', '.join(labels)}; name one with --label-column."
            )
        decimals = "regression" in tasks and sample.has_decimals(labels[0])
        if not request.task and (decimals or self._may_be_score(labels[0])):
            return "regression"
        return next((task for task in tasks if task in OF_ROWS), "classification")

    def unlabeled_columns(self, modality: Modality) -> TableColumns:
        """The columns of inputs alone, for a model of this modality; a language model takes one.

        Raises UsageError also if it is not clear which columns to use.
        """
        request, image, texts = self.request, self.image_option, self.text_options
        label = request.label_column
        taken = {*parts_of(label, self.sample.values)} if label else set[str]()
        if modality == "image":
            if image is None and request.task == "segmentation":
                image, mask = self.image_and_mask()
                image = None if mask is None else image
            image = image or self._image(taken)
        elif request.task == "token-classification" and (tokens := self.tokens()):
            return TableColumns.of(tokens=tokens)
        elif request.task in LANGUAGE:
            text = self.single_text()
            texts = () if text is None else (text,)
        else:
            texts = texts or self._texts(taken)
        if image is None and not texts:
            raise UsageError(
                f"none of the columns of {request.name} clearly holds {modality}s: {self.listed}; "
                f"name one with --{modality}-column."
            )
        return TableColumns.of(image=image, **_text_roles(texts))


def _text_roles(texts: Iterable[str]) -> dict[str, str]:
    return dict(zip(TEXT_COLUMNS, texts, strict=False))
