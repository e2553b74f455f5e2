"""The columns of a table that a task uses, and their roles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import Task
from razorctl.data.own import chats, rows
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read.column import Column
from razorctl.data.own.request import DataRequest
from razorctl.models import Modality
from razorctl.models.rows import text_columns

if TYPE_CHECKING:
    from datasets import Dataset

# Task -> the role of its label.
ROLES: Mapping[Task, str] = {
    "classification": "label",
    "regression": "number",
    "multi-label": "labels",
    "token-classification": "tags",
    "detection": "objects",
}
IMAGE_TEXT = ("image", "text")  # names of the classes of images with captions
UNUSED = 10  # columns that are not used, in a sentence
FLAG = "flag."  # begins the roles of columns of 0 and 1, one for each label
# Words for roles.
WORDS = {
    "text_pair": "text",
    "messages": "conversations",
    "negative": "text",
    **dict.fromkeys(("number", "labels", "flag"), "label"),
    "objects": "boxes",
}


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that a task uses.

    roles: pairs of a role, which is a column of `RawRows`, and the column of the table. Without
    labels there is no role of a label. unused: the other columns of the table. notes: as in
    `RawRows`.
    """

    roles: tuple[tuple[str, str], ...]
    task: Task = "classification"
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: Task = "classification", /, **roles: Column | None) -> "TableColumns":
        """The columns with these roles; a role that is None is left out."""
        return cls(tuple((role, column.name) for role, column in roles.items() if column), task)

    def get(self, role: str) -> str | None:
        """The column with a role; None if there is none."""
        return dict(self.roles).get(role)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The columns of a number, of 0 and 1, or else of an embedding's texts; None for others.

        Of an embedding of images and texts it is IMAGE_TEXT.
        """
        names = [column for role, column in self.roles if role == "number" or role.startswith(FLAG)]
        if self.task == "embedding" and self.get("image"):
            return IMAGE_TEXT
        if self.task == "embedding" and not names:
            names = [
                column for role, column in self.roles if role in text_columns(dict(self.roles))
            ]
        return tuple(names) or None

    @property
    def answer(self) -> str | None:
        """The column of labels; None for columns of 0 and 1, and without labels."""
        return next((column for role, column in self.roles if role in ROLES.values()), None)

    @property
    def renamed(self) -> dict[str, str]:
        """Column -> its name in `RawRows`."""
        return {column: role for role, column in self.roles}

    @property
    def fields(self) -> list[str]:
        """The columns of `RawRows`; the parts of conversations become one."""
        names = ("messages" if role in chats.PARTS else role for role, _ in self.roles)
        return list(dict.fromkeys(names))

    def raw_rows(
        self,
        request: DataRequest,
        splits: dict[str, "Dataset"],
        names: dict[str, str],
        left_out: str = "",
    ) -> RawRows:
        """The rows of splits with these columns; splits without labels are left out.

        names: split -> its name in the data. left_out: words on splits that are left out already.
        """
        details = self.details(left_out + rows.unlabeled_out(request, splits, names))
        more: dict[str, Any] = {
            "class_names": self.class_names,
            "task": self.task,
            "notes": self.notes,
        }
        return RawRows(request.name, splits, names, details, **more)

    @property
    def modality(self) -> Modality:
        return "text" if self.get("image") is None else "image"

    def details(self, more: str = "") -> str:
        """The columns, as the end of a sentence. more: words before the unused columns."""
        words: dict[str, list[str]] = {}
        for role, column in self.roles:
            word = WORDS.get(role.partition(".")[0], role)
            name = f"column {column}" if column.isdigit() else column
            words.setdefault(word, []).append(name)
        used = ", ".join(f"{word} in {' and '.join(columns)}" for word, columns in words.items())
        unused = ", ".join(self.unused[:UNUSED]) + (", ..." if len(self.unused) > UNUSED else "")
        return f"{used}{more}" + (f"; not used: {unused}" if unused else "")
