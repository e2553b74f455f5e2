"""Conversations: a list of messages, each with a role and a content.

Those of ShareGPT, which have the same under other names, become such lists as they are read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from razorctl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

KEYS = ("role", "content")
SHARED = ("from", "value")  # the keys of ShareGPT
ROLES = {"human": "user", "gpt": "assistant"}  # its words, and those that templates know
ORDER = "roles are not user and assistant in turn, after a system message if any"


def kind() -> "pa.DataType":
    """The type of a column of conversations."""
    import pyarrow as pa

    return pa.list_(pa.struct([(key, pa.string()) for key in KEYS]))


def written(value: Any) -> tuple[list[dict[str, str]] | None, str | None]:
    """A conversation as a file of JSON has it, and what is wrong with it if it is none."""
    if not isinstance(value, list):
        return None, "messages are no list"
    found = []
    for message in value:
        texts = _texts(message) if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            return None, "a message without role and content"
        found.append(dict(zip(KEYS, texts, strict=True)))
    return found, None


def _texts(message: Mapping[str, Any]) -> list[Any]:
    """The role and the content of a message, under the keys of either kind."""
    if not message.keys() & {*KEYS} and message.keys() >= {*SHARED}:
        role, content = (message[key] for key in SHARED)
        return [ROLES.get(role, role) if isinstance(role, str) else role, content]
    return [message.get(key) for key in KEYS]


def standard(column: Any) -> Any:
    """An array of conversations of ShareGPT as one of role and content; any other as it is.

    A role that is none of ROLES stays, which `faults` then says.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _shared(column.type):
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([standard(chunk) for chunk in column.chunks], kind())
    counts = pc.fill_null(pc.list_value_length(column), 0)
    offsets = pa.concat_arrays([pa.array([0], counts.type), pc.cumulative_sum(counts)])
    messages = pc.list_flatten(column)
    role, content = (pc.struct_field(messages, key).cast(pa.string()) for key in SHARED)
    for own, usual in ROLES.items():
        role = pc.if_else(pc.equal(role, own), usual, role)
    both = pa.StructArray.from_arrays([role, content], KEYS)
    return pa.ListArray.from_arrays(offsets.cast(pa.int32()), both)


def _shared(kind: "pa.DataType") -> bool:
    """Whether messages of this type have the keys of ShareGPT, and not those of `KEYS`."""
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    inner = kind.value_type
    names = {field.name for field in inner} if pa.types.is_struct(inner) else set()
    return names >= {*SHARED} and not names & {*KEYS}


def faults(column: "pa.ChunkedArray", answered: bool = True) -> dict[int, str]:
    """The rows whose conversations cannot be learned from, or answered, and why.

    Messages are of user and assistant in turn, after one of system if any. Raises DataError for a
    column of another type.
    answered: whether one of the assistant must be among them, and not only one of the user.
    """
    _check(column.type)
    needed = ("assistant", "no answer of an assistant") if answered else ("user", "no question")
    found: dict[int, str] = {}
    start = 0
    for chunk in column.chunks:
        found |= {start + row: reason for row, reason in _faults(chunk, *needed).items()}
        start += len(chunk)
    return found


def _check(kind: "pa.DataType") -> None:
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if inner is not None and pa.types.is_struct(inner):
        texts = [inner.field(key).type for key in KEYS if inner.get_field_index(key) >= 0]
        if len(texts) == 2 and all(
            pa.types.is_string(text) or pa.types.is_large_string(text) for text in texts
        ):
            return
    raise DataError(
        f"the column of messages has values of type {kind}; give lists of role and content, or "
        "choose another column with --text-column."
    )


def _faults(chunk: "pa.Array", needed: str, without: str) -> dict[int, str]:
    import numpy as np
    import pyarrow.compute as pc

    counts = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
    messages = pc.list_flatten(chunk)
    rows = np.repeat(np.arange(len(chunk)), counts)
    starts = np.cumsum(counts) - counts
    roles = np.asarray(pc.struct_field(messages, "role").fill_null("").to_pylist(), dtype=object)
    content = pc.struct_field(messages, "content")
    written = pc.fill_null(pc.match_substring_regex(content, r"\S"), False)
    blank = ~written.to_numpy(zero_copy_only=False).astype(bool)

    system = roles == "system"
    first = np.zeros(len(chunk), np.int64)  # the place of the first user message
    first[rows[system & (np.arange(len(rows)) == starts[rows])]] = 1
    place = np.arange(len(rows)) - starts[rows] - first[rows]
    expected = np.where(place < 0, "system", np.where(place % 2 == 0, "user", "assistant"))

    lacking = np.setdiff1d(np.arange(len(chunk)), rows[roles == needed])
    found = {
        **dict.fromkeys(lacking.tolist(), without),
        **dict.fromkeys(rows[roles != expected].tolist(), ORDER),
        **dict.fromkeys(rows[blank].tolist(), "an empty message"),
        **dict.fromkeys(np.flatnonzero(counts == 0).tolist(), "no messages"),
    }
    return found
