"""The first rows of a table with the request for it: the columns that may have each role."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from razorctl.config.job_checks import columns_as
from razorctl.data.own.read.column import Column, Columns, normalized
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError

LABELS = frozenset({"label", "labels", "class", "target", "category"})
SCORES = frozenset({"score", "rating", "similarity", "similarity_score", "stars"})
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


def parts_of(names: str | None, columns: Collection[str]) -> list[str]:
    """The columns that an option names, such as `a,b`; none for None.

    columns: all columns; one of these may have a comma in its name.
    """
    if names is None:
        return []
    return [names] if names in columns else [part.strip() for part in names.split(",")]


@dataclass(frozen=True)
class Table:
    """The columns of the first rows of a table, and the request for it.

    Methods raise UsageError, which lists the columns, if an option names a column that is not there
    and if several columns may have one role.
    """

    request: DataRequest
    columns: Columns

    @classmethod
    def for_run(cls, request: DataRequest, columns: Columns) -> "Table":
        """The table, with options for the columns of a finished run that it has.

        The job's options stay. If one names images or texts, neither is taken from the run.
        """
        trained = request.trained
        columns = _aliased(request, columns)
        if trained is None:
            return cls(request, columns)

        def there(names: str | None) -> str | None:
            return names if {*parts_of(names, columns)} <= columns.keys() else None

        if request.label_column is None:
            request = replace(request, label_column=there(trained.label_column))
        if request.image_column is None and request.text_column is None:
            image = trained.image_column if trained.image_column in columns else None
            request = replace(request, image_column=image, text_column=there(trained.text_column))
        return cls(request, columns)

    @cached_property
    def by_key(self) -> dict[str, Column]:
        """The key of each column -> the column."""
        return {column.key: column for column in self.columns.values()}

    @property
    def listed(self) -> str:
        """The columns, for a sentence."""
        return ", ".join(map(str, self.columns))

    @cached_property
    def images(self) -> list[Column]:
        """The columns of images."""
        return self._image_columns()

    @property
    def clear(self) -> bool:
        """Whether a column is called a text and another its label."""
        return bool(self.by_key.keys() & LABELS) and bool(self.by_key.keys() & TEXTS)

    def first(self, keys: Iterable[str]) -> Column | None:
        """The column with the first of these keys that there is."""
        return next((self.by_key[key] for key in keys if key in self.by_key), None)

    def named(self, name: str, option: str) -> Column:
        """The column that --OPTION names."""
        if name not in self.columns:
            raise UsageError(
                f"{self.request.name} has no column {name}, only {self.listed}; name one of them "
                f"with --{option}."
            )
        return self.columns[name]

    def only(
        self, columns: Sequence[Column], role: str, option: str, of: str = ""
    ) -> Column | None:
        """The only column that may have a role, or None. of: all columns, for the error."""
        if len(columns) > 1:
            raise UsageError(
                f"{self.request.name} has several columns that may be the {role}, "
                f"{', '.join(column.name for column in columns)}, of {of or self.listed}; choose "
                f"with --{option}."
            )
        return columns[0] if columns else None

    @property
    def image_option(self) -> Column | None:
        """The column that --image-column names."""
        name = self.request.image_column
        return None if name is None else self.named(name, "image-column")

    @property
    def text_options(self) -> tuple[Column, ...]:
        """The one or two columns that --text-column names; of an embedding also more."""
        names = self.request.text_column
        parts = parts_of(names, self.columns)
        several = self.request.task == "embedding"  # which has negatives, too
        if (len(parts) > 2 and not several) or len(set(parts)) < len(parts):
            raise UsageError(
                f"text column {names!r} does not name one or two columns; give a or a,b."
            )
        return tuple(self.named(part, "text-column") for part in parts)

    @property
    def label_options(self) -> tuple[Column, ...]:
        """The columns that --label-column names."""
        parts = parts_of(self.request.label_column, self.columns)
        return tuple(self.named(part, "label-column") for part in dict.fromkeys(parts))

    def _image_columns(self, taken: Collection[Column] = ()) -> list[Column]:
        """The columns of images that are not `taken`; if some have an image type, these alone."""
        free = [column for column in self.columns.values() if column not in taken]
        typed = [column for column in free if column.holds == "images"]
        return typed or [column for column in free if column.has_images()]

    def image(self, taken: Collection[Column]) -> Column | None:
        """The column of images; None if there is none."""
        candidates = self._image_columns(taken)
        called_image = [column for column in candidates if column.key == "image"]
        return self.only(called_image or candidates, "image", "image-column")

    def texts(
        self, taken: Collection[Column] = (), image: Column | None = None
    ) -> tuple[Column, ...]:
        """The column of texts, or the two of a pair, by their names or as the only prose."""
        columns = (c for c in self.columns.values() if c not in taken and c is not image)
        free = {column.key: column for column in columns if not column.holds and column.texts}
        pairs = [tuple(free[key] for key in pair) for pair in PAIRS if free.keys() >= {*pair}]
        singles = [column for key, column in free.items() if key in TEXTS]
        if len(pairs) == 1 and {*singles} <= {*pairs[0]}:
            return pairs[0]
        candidates = [column for pair in pairs for column in pair] + singles
        if not candidates and image is None:
            candidates = [c for key, c in free.items() if key not in LABELS and c.is_prose]
        option = "text-column"
        if self.request.tasks[0] == "causal-lm":
            option += ", of prompts and answers both: a,b"
        text = self.only(list(dict.fromkeys(candidates)), "text", option)
        return () if text is None else (text,)

    def free(self, inputs: Collection[Column]) -> list[Column]:
        """The columns that may be labels: all but the inputs and images by their type."""
        columns = self.columns.values()
        return [column for column in columns if column not in inputs and column.holds != "images"]

    def may_have_label(self, inputs: Sequence[Column]) -> bool:
        """Whether a column beside the inputs may be the label of a classifier."""
        unclear = any(len(column.values) < 2 for column in self.free(inputs))
        return unclear or bool(self.labels(inputs))

    def labels(self, inputs: Sequence[Column], *, by_name: bool = False) -> Sequence[Column]:
        """The columns that may be the label; more than one is not clear.

        inputs: the columns that are no labels. by_name: whether only names and types count, and not
        values.
        """
        if options := self.label_options:
            return options
        tasks, free = self.request.tasks, self.free(inputs)
        scores = [column for column in free if "regression" in tasks and column.has_decimals]
        sole_score = scores if scores == free else []
        signs: list[Callable[[Column], bool]] = [
            lambda column: column.key in LABELS,
            lambda column: column.holds == "classes",
            lambda column: column.key in SCORES and column in scores,
        ]
        if not by_name:
            signs += [
                lambda column: "multi-label" in tasks and column.has_lists(str),
                lambda column: column.may_be_classes(),
                lambda column: column.may_be_classes(len(column.values)),
                lambda column: self.may_be_score(column) or [column] == sole_score,
            ]
        return next(filter(None, ([c for c in free if sign(c)] for sign in signs)), [])

    def may_be_score(self, column: Column) -> bool:
        """Whether a column is called a score and has too many numbers for classes."""
        called = "regression" in self.request.tasks and column.key in SCORES
        return called and bool(column.numbers) and not column.may_be_classes()


def _aliased(request: DataRequest, columns: Columns) -> Columns:
    """The columns with the aliases of --column, or else of a finished run.

    Raises UsageError if --column names a column that is absent. A run may name absent columns.
    """
    own, trained = request.column, request.trained
    text = own or (trained.column if trained else None)
    if text is None:
        return columns
    aliases = {name: normalized(alias) for alias, name in columns_as(text).items()}
    for name in aliases if own else ():
        Table(request, columns).named(name, "column")
    taken = {alias for name, alias in aliases.items() if name in columns}
    return {
        name: replace(column, alias=aliases.get(name, "" if column.key in taken else None))
        for name, column in columns.items()
    }
