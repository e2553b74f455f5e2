"""The columns of a table that a task uses, and their roles."""

from collections.abc import Mapping
from dataclasses import dataclass

from razorctl.config.tasks import Task
from razorctl.data.own import chats
from razorctl.data.own.read.column import Column
from razorctl.models import Modality

# Task -> the role of its label.
ROLES: Mapping[Task, str] = {
    "classification": "label",
    "regression": "number",
    "multi-label": "labels",
    "token-classification": "tags",
}
UNUSED = 10  # columns that are not used, in a sentence
FLAG = "flag."  # begins the roles of columns of 0 and 1, one for each label
# Words for roles.
WORDS = {
    "text_pair": "text",
    "messages": "conversations",
    **dict.fromkeys(("number", "labels", "flag"), "label"),
}


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that a task uses.

    roles: each role, a column of `RawRows`, with the column of the table. There is no `label` if
    labels are not read. unused: the other columns of the table. notes: as of `RawRows`.
    """

    roles: tuple[tuple[str, str], ...]
    task: Task = "classification"
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: Task = "classification", /, **roles: Column | None) -> "TableColumns":
        """The columns with these roles; None is no column."""
        return cls(tuple((role, column.name) for role, column in roles.items() if column), task)

    def get(self, role: str) -> str | None:
        """The column with a role; None if there is none."""
        return dict(self.roles).get(role)

    @property
    def modality(self) -> Modality:
        return "text" if self.get("image") is None else "image"

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of what is learned, if these are columns: of a number, or of 0 and 1."""
        names = [column for role, column in self.roles if role == "number" or role.startswith(FLAG)]
        return tuple(names) or None

    @property
    def answer(self) -> str | None:
        """The column of the label, if there is one and no more."""
        return next((column for role, column in self.roles if role in ROLES.values()), None)

    @property
    def renamed(self) -> dict[str, str]:
        """Column -> its name in `RawRows`."""
        return {column: role for role, column in self.roles}

    @property
    def fields(self) -> list[str]:
        """The columns of `RawRows`: parts of conversations are one."""
        names = ("messages" if role in chats.PARTS else role for role, _ in self.roles)
        return list(dict.fromkeys(names))

    def details(self, more: str = "") -> str:
        """The columns, as the end of a sentence. more: stands before the unused columns."""
        words: dict[str, list[str]] = {}
        for role, column in self.roles:
            word = WORDS.get(role.partition(".")[0], role)
            name = f"column {column}" if column.isdigit() else column
            words.setdefault(word, []).append(name)
        used = ", ".join(f"{word} in {' and '.join(columns)}" for word, columns in words.items())
        unused = ", ".join(self.unused[:UNUSED]) + (", ..." if len(self.unused) > UNUSED else "")
        return f"{used}{more}" + (f"; not used: {unused}" if unused else "")
